// Costs of single operators against numbers worked out by hand.
#include <gtest/gtest.h>

#include "partitioner/cost/device_model.h"
#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/operator_cost.h"
#include "partitioner/cost/operator_table.h"
#include "tests/support/graph_builder.h"

namespace smp::partitioner {
namespace {

using smp::testing::contiguous_spec;
using smp::testing::GraphBuilder;

OperatorCost cost_of_last(const GraphBuilder& builder, bool trains = true) {
  const Graph graph = builder.build();
  return operator_cost(graph, graph.nodes.back(), trains);
}

/// Activation bytes of the last node when the value `root` is the loss.
int64_t saved_by_last(const GraphBuilder& builder, ValueId root) { return activation_bytes(builder.build(root)).back(); }

TEST(OperatorCost, LinearCountsMultiplyAddsAndBothGradients) {
  GraphBuilder g;
  const ValueId x = g.op("aten::relu", {g.parameter("p", {8, 16})}, {8, 16});
  g.linear(x, "fc", 32);
  const OperatorCost cost = cost_of_last(g);
  EXPECT_EQ(cost.forward.flops, 2 * 8 * 16 * 32);
  EXPECT_EQ(cost.forward.bytes, 4 * (8 * 16 + 32 * 16 + 32 + 8 * 32));
  EXPECT_EQ(cost.backward.flops, 2 * cost.forward.flops);  // input and weight; a bias is summed
  EXPECT_EQ(cost.backward.bytes,
            2 * cost.forward.bytes + 2 * 4 * (32 * 16 + 32) + 4 * 8 * 32);  // accumulating, summing
}

/// Graphs come from other ranks, too.
TEST(OperatorCost, TensorsMayHaveFewerDimensionsThanTheirOperatorTakes) {
  GraphBuilder g;
  const ValueId x = g.input({16, 9, 4, 4}), scalar = g.parameter("scalar", {});
  g.op("aten::conv2d", {x, scalar}, {});
  g.op("aten::conv2d", {x, g.parameter("row", {9})}, {9});
  g.op("aten::lstm_cell", {x, x, scalar, scalar}, {16, 9});
  g.op("aten::chain_matmul", {scalar, x}, {});
  g.op("aten::tensordot", {x, x}, {4, 4});
  g.last_node().arguments.emplace_back(std::vector<int64_t>{-9, 1000});
  const Graph graph = g.build(g.sum(x));
  for (const Node& node : graph.nodes) {
    const OperatorRow& row = operator_row(node);
    const double flops = row.flops == nullptr ? 0 : row.flops(graph, node);
    EXPECT_GE(flops, 0) << node.op;
    for (const auto bytes : {row.extra_saved_bytes, row.workspace_bytes, row.backward_workspace_bytes}) {
      const int64_t counted = bytes == nullptr ? 0 : bytes(graph, node);
      EXPECT_GE(counted, 0) << node.op;
    }
  }
}

TEST(OperatorCost, ProductWithOneTrainedArgumentCostsOneForwardBackward) {
  GraphBuilder g;
  const ValueId weight = g.parameter("w", {16, 32});
  g.op("aten::mm", {g.input({8, 16}), weight}, {8, 32});
  const OperatorCost cost = cost_of_last(g);
  EXPECT_EQ(cost.backward.flops, cost.forward.flops);
  EXPECT_EQ(cost.backward.bytes, cost.forward.bytes + 2 * 4 * 16 * 32);
}

TEST(OperatorCost, AddmmContractsItsSecondArgument) {
  GraphBuilder g;
  const ValueId bias = g.parameter("b", {32});
  g.op("aten::addmm", {bias, g.input({8, 16}), g.parameter("w", {16, 32})}, {8, 32});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2 * 8 * 16 * 32);
}

TEST(OperatorCost, BiasesAreNoFactorsOfTheirProducts) {
  GraphBuilder g;
  g.linear(g.input({8, 16}), "first", 32);
  EXPECT_EQ(cost_of_last(g).backward.flops, cost_of_last(g).forward.flops);
  const ValueId bias = g.parameter("b", {32});
  g.op("aten::addmm", {bias, g.input({8, 16}), g.parameter("w", {16, 32})}, {8, 32});
  EXPECT_EQ(cost_of_last(g).backward.flops, cost_of_last(g).forward.flops);
  g.op("aten::conv2d", {g.input({2, 3, 10, 10}), g.parameter("c", {7, 3, 3, 3}), g.parameter("d", {7})}, {2, 7, 8, 8});
  EXPECT_EQ(cost_of_last(g).backward.flops, cost_of_last(g).forward.flops);
}

TEST(OperatorCost, SquareOfAMatrixHasTwoFactors) {
  GraphBuilder g;
  const ValueId x = g.parameter("w", {16, 16});
  g.op("aten::mm", {x, x}, {16, 16});
  EXPECT_EQ(cost_of_last(g).backward.flops, 2 * cost_of_last(g).forward.flops);
}

TEST(OperatorCost, ProductsOfOtherFormsCountWhatTheyContract) {
  GraphBuilder g;
  const ValueId a = g.input({4, 5, 6}), b = g.input({4, 6, 7});
  g.op("aten::addbmm", {g.input({5, 7}), a, b}, {5, 7});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2 * 4 * 5 * 6 * 7);
  g.op("aten::bilinear", {g.input({9, 3}), g.input({9, 4}), g.parameter("w", {5, 3, 4})}, {9, 5});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2 * 9 * 5 * 3 * 4);
  g.op("aten::tensordot", {a, g.input({6, 5, 8})}, {4, 8});
  g.last_node().arguments.push_back(std::vector<int64_t>{1, -1});
  g.last_node().arguments.push_back(std::vector<int64_t>{1, 0});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2 * 4 * 8 * (5 * 6));
  g.op("aten::cdist", {g.input({10, 3}), g.input({20, 3})}, {10, 20});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2 * 10 * 20 * 3);
  g.op("aten::chain_matmul", {}, {2, 5});
  g.last_node().arguments.push_back(ValueRefList{{g.input({2, 3}), g.input({3, 4}), g.input({4, 5})}, false});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2 * (2 * 3 * 4) + 2 * (2 * 4 * 5));
}

TEST(OperatorCost, RecurrentCellsCountBothWeights) {
  for (const char* op : {"aten::lstm_cell", "aten::gru_cell"}) {
    GraphBuilder g;
    const ValueId state = g.input({2, 4});
    g.op(op, {g.input({2, 8})}, {2, 4});
    g.last_node().arguments.push_back(ValueRefList{{state, state}, false});
    g.last_node().arguments.push_back(ValueRef{g.parameter("ih", {16, 8})});
    g.last_node().arguments.push_back(ValueRef{g.parameter("hh", {16, 4})});
    EXPECT_EQ(cost_of_last(g).forward.flops, 2 * (16 * 8 + 16 * 4) * 2) << op;
  }
}

TEST(OperatorCost, BatchedMatmulCountsEveryBatch) {
  GraphBuilder g;
  g.op("aten::matmul", {g.input({3, 8, 16}), g.input({3, 16, 5})}, {3, 8, 5});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2 * 3 * 8 * 16 * 5);
}

TEST(OperatorCost, ConvolutionCountsWeightsPerOutputElement) {
  GraphBuilder g;
  g.op("aten::conv2d", {g.input({2, 3, 10, 10}), g.parameter("w", {7, 3, 3, 3})}, {2, 7, 8, 8});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2.0 * (2 * 7 * 8 * 8) * (3 * 3 * 3));
}

TEST(OperatorCost, TransposedConvolutionCountsWeightsPerInputElement) {
  GraphBuilder g;
  g.op("aten::conv_transpose2d", {g.input({2, 3, 10, 10}), g.parameter("w", {3, 7, 2, 2})}, {2, 7, 20, 20});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2.0 * (2 * 3 * 10 * 10) * (7 * 2 * 2));
}

TEST(OperatorCost, LstmCountsItsWeightsPerPosition) {
  GraphBuilder g;
  const ValueId x = g.input({5, 2, 8});
  const ValueId state = g.input({1, 2, 4});
  const ValueId input_weight = g.parameter("w_ih", {16, 8}), hidden_weight = g.parameter("w_hh", {16, 4});
  g.op("aten::lstm", {x}, {5, 2, 4});
  Node& node = g.last_node();
  node.arguments.push_back(ValueRefList{{state, state}, false});
  node.arguments.push_back(ValueRefList{{input_weight, hidden_weight}, false});
  const OperatorCost cost = cost_of_last(g);
  EXPECT_EQ(cost.forward.flops, 2.0 * (16 * 8 + 16 * 4) * (5 * 2));
  EXPECT_EQ(cost.forward.kernels, 50);
}

TEST(OperatorCost, AttentionCountsScoresAndMix) {
  GraphBuilder g;
  g.op("aten::scaled_dot_product_attention", {g.input({2, 4, 10, 8}), g.input({2, 4, 12, 8}), g.input({2, 4, 12, 8})},
       {2, 4, 10, 8});
  EXPECT_EQ(cost_of_last(g).forward.flops, 2.0 * 2 * (2 * 4) * 10 * 12 * 8);
}

TEST(OperatorCost, EmbeddingReadsRowsForwardAndFillsItsTableBackward) {
  GraphBuilder g;
  const ValueId indices = g.input({6}, c10::ScalarType::Long);
  g.op("aten::embedding", {g.parameter("table", {1000, 16}), indices}, {6, 16});
  const OperatorCost cost = cost_of_last(g);
  EXPECT_EQ(cost.forward.bytes, 6 * 8 + 2 * 4 * 6 * 16);
  EXPECT_GE(cost.backward.bytes, 3 * 4 * 1000 * 16);
}

TEST(OperatorCost, ViewsAreFree) {
  GraphBuilder g;
  const ValueId x = g.relu(g.parameter("p", {4, 6}));
  g.view("aten::view", x, contiguous_spec({24}));
  const OperatorCost cost = cost_of_last(g);
  EXPECT_EQ(cost.forward.bytes, 0);
  EXPECT_EQ(cost.backward.bytes, 0);
}

TEST(OperatorCost, ReshapeMovesItsBytesWhereItCopies) {
  for (const char* op : {"aten::reshape", "aten::flatten", "aten::contiguous", "aten::to"}) {
    GraphBuilder g;
    const ValueId x = g.relu(g.parameter("p", {4, 6}));
    g.view(op, x, contiguous_spec({24}));
    EXPECT_EQ(cost_of_last(g).forward.bytes, 0) << op;
    g.op(op, {x}, {24});
    EXPECT_EQ(cost_of_last(g).forward.bytes, 2 * 4 * 24) << op;
  }
}

TEST(OperatorCost, UnknownOperatorMovesItsBytesOnce) {
  GraphBuilder g;
  g.op("custom::wiggle", {g.input({10})}, {10});
  EXPECT_EQ(cost_of_last(g).forward, (Work{.bytes = 80, .kernels = 1}));
}

TEST(OperatorCost, NothingToTrainHasNoBackward) {
  GraphBuilder g;
  g.linear(g.input({8, 16}), "fc", 32);
  EXPECT_EQ(cost_of_last(g, /*trains=*/false).backward, Work{});
  g.last_node().grad_enabled = false;
  EXPECT_EQ(cost_of_last(g).backward, Work{});
}

TEST(OperatorCost, InPlaceFormUsesTheRowOfItsName) {
  Node node;
  node.op = "aten::dropout_";
  EXPECT_EQ(operator_row(node).op, "aten::dropout");
}

TEST(DeviceModel, SlowerOfComputeAndMemoryDecides) {
  const DeviceModel device{
      .peak_gflops = 100, .memory_gigabytes_per_s = 10, .forward_overhead_us = 1, .backward_overhead_us = 3};
  EXPECT_DOUBLE_EQ(device.forward_us({.flops = 1e6, .bytes = 1e3, .kernels = 1}), 10 + 1);
  EXPECT_DOUBLE_EQ(device.backward_us({.flops = 1e3, .bytes = 1e6, .kernels = 2}), 100 + 6);
}

TEST(DeviceModel, ProductsOf16BitsHaveASpeedOfTheirOwn) {
  const DeviceModel device{.peak_gflops = 100, .half_gflops = 1000, .forward_overhead_us = 0};
  EXPECT_DOUBLE_EQ(device.forward_us({.flops = 1e6, .half_flops = 2e6}), 10 + 2);
}

TEST(DeviceModel, MessagePaysLatencyAndBytes) {
  const DeviceModel device{.link_gigabytes_per_s = 2, .link_latency_us = 7};
  EXPECT_DOUBLE_EQ(device.message_us(4'000'000), 7 + 2000);
}

TEST(MemoryModel, ReluKeepsItsOutput) {
  GraphBuilder g;
  const ValueId y = g.relu(g.parameter("p", {100}));
  EXPECT_EQ(saved_by_last(g, y), 400);
}

TEST(MemoryModel, ProductKeepsTheInputOfATrainedWeightAndNoWeight) {
  GraphBuilder g;
  const ValueId y = g.linear_with(g.input({8, 16}), g.parameter("w", {32, 16}));
  EXPECT_EQ(saved_by_last(g, y), 4 * 8 * 16);
}

TEST(MemoryModel, ProductWithAFrozenWeightKeepsNothing) {
  GraphBuilder g;
  const ValueId x = g.op("aten::add", {g.parameter("p", {8, 16})}, {8, 16});
  const ValueId weight = g.buffer("frozen", {32, 16});
  const ValueId y = g.linear_with(x, weight);
  EXPECT_EQ(saved_by_last(g, y), 0);
}

TEST(MemoryModel, SquareKeepsItsArgument) {
  GraphBuilder g;
  const ValueId x = g.op("aten::add", {g.parameter("p", {10})}, {10});
  const ValueId y = g.op("aten::mul", {x, x}, {10});
  EXPECT_EQ(saved_by_last(g, y), 40);
}

TEST(MemoryModel, StorageCountsOnceAcrossNodes) {
  GraphBuilder g;
  const ValueId x = g.relu(g.parameter("p", {8, 16}));
  const ValueId y = g.linear_with(x, g.parameter("w", {32, 16}));
  EXPECT_EQ(saved_by_last(g, y), 0);  // relu keeps x already
}

TEST(MemoryModel, DropoutKeepsItsNoise) {
  GraphBuilder g;
  const ValueId y = g.op("aten::dropout", {g.parameter("p", {50})}, {50});
  EXPECT_EQ(saved_by_last(g, y), 200);
}

TEST(MemoryModel, DropoutOfNothingKeepsNothing) {
  GraphBuilder g;
  const ValueId y = g.op("aten::dropout", {g.parameter("p", {50})}, {50});
  g.last_node().arguments.push_back(0.0);
  EXPECT_EQ(saved_by_last(g, y), 0);
}

TEST(MemoryModel, ViewOfAParameterIsKeptAnyway) {
  GraphBuilder g;
  const ValueId x = g.op("aten::add", {g.parameter("p", {8, 16})}, {8, 16});
  TensorSpec turned = contiguous_spec({16, 32});
  turned.requires_grad = true;
  const ValueId weight = g.view("aten::t", g.parameter("w", {32, 16}), turned);
  const ValueId y = g.op("aten::matmul", {x, weight}, {8, 32});
  EXPECT_EQ(saved_by_last(g, y), 4 * 8 * 16);
}

TEST(MemoryModel, LayerNormKeepsItsInputAndTwoNumbersPerRow) {
  GraphBuilder g;
  const ValueId x = g.op("aten::add", {g.parameter("p", {8, 2, 16})}, {8, 2, 16});
  const ValueId y = g.op("aten::layer_norm", {x}, {8, 2, 16});
  g.last_node().arguments.push_back(std::vector<int64_t>{2, 16});
  EXPECT_EQ(saved_by_last(g, y), 4 * (8 * 2 * 16) + 4 * 2 * 8);
}

TEST(MemoryModel, BatchNormKeepsItsInputAndTwoNumbersPerChannel) {
  GraphBuilder g;
  const ValueId x = g.op("aten::add", {g.parameter("p", {8, 3, 5})}, {8, 3, 5});
  const ValueId y = g.op("aten::batch_norm", {x}, {8, 3, 5});
  EXPECT_EQ(saved_by_last(g, y), 4 * (8 * 3 * 5) + 4 * 2 * 3);
}

TEST(MemoryModel, MaskedFillKeepsItsMaskOnly) {
  GraphBuilder g;
  const ValueId x = g.op("aten::add", {g.parameter("p", {50})}, {50});
  const ValueId y = g.op("aten::masked_fill", {x, g.input({50}, c10::ScalarType::Bool)}, {50});
  EXPECT_EQ(saved_by_last(g, y), 50);
}

TEST(MemoryModel, CrossEntropyKeepsTargetsLogSoftmaxAndTotalWeight) {
  GraphBuilder g;
  const ValueId logits = g.op("aten::add", {g.parameter("p", {8, 100})}, {8, 100});
  const ValueId y = g.op("aten::cross_entropy_loss", {logits, g.input({8}, c10::ScalarType::Long)}, {});
  EXPECT_EQ(saved_by_last(g, y), 4 * 8 * 100 + 8 * 8 + 4);
}

TEST(MemoryModel, EmbeddingKeepsItsIndices) {
  GraphBuilder g;
  const ValueId indices = g.input({6}, c10::ScalarType::Long);
  const ValueId y = g.op("aten::embedding", {g.parameter("table", {1000, 16}), indices}, {6, 16});
  EXPECT_EQ(saved_by_last(g, y), 48);
}

TEST(MemoryModel, EvaluationKeepsNothing) {
  GraphBuilder g;
  g.relu(g.parameter("p", {100}));
  EXPECT_EQ(saved_by_last(g, kNoValue), 0);
}

/// Saved beyond queries, keys, values and the result.
int64_t saved_by_attention(double dropout, bool has_heads = true) {
  using Sizes = std::vector<int64_t>;
  GraphBuilder g;
  const auto make = [&](const char* name, int64_t positions) {
    const Sizes sizes = has_heads ? Sizes{2, 4, positions, 8} : Sizes{2, positions, 8};
    return g.op("aten::add", {g.parameter(name, sizes)}, sizes);
  };
  const ValueId query = make("q", 10), key = make("k", 12), value = make("v", 12);
  const Sizes sizes = has_heads ? Sizes{2, 4, 10, 8} : Sizes{2, 10, 8};
  const ValueId y = g.op("aten::scaled_dot_product_attention", {query, key, value}, sizes);
  g.last_node().arguments.emplace_back();
  g.last_node().arguments.emplace_back(dropout);
  const int64_t tensors = 4 * 8 * (10 + 12 + 12 + 10) * (has_heads ? 8 : 2);
  return saved_by_last(g, y) - tensors;
}

TEST(MemoryModel, AttentionInOneKernelKeepsANumberPerQuery) { EXPECT_EQ(saved_by_attention(0), 4 * (2 * 4) * 10); }

/// Copies of queries, keys and values, and not the result.
TEST(MemoryModel, AttentionWithDropoutKeepsItsWeightsThreeTimes) {
  EXPECT_EQ(saved_by_attention(0.1), 4 * (2 * 4) * (3 * 10 * 12 - 8 * 10));
}

TEST(MemoryModel, AttentionWithoutHeadsKeepsItsWeights) {
  EXPECT_EQ(saved_by_attention(0, /*has_heads=*/false), 4 * 2 * (10 * 12 - 8 * 10));
}

TEST(MemoryModel, ParameterBytesIncludeGradientAndOptimizerState) {
  GraphBuilder g;
  const ValueId weight = g.parameter("w", {10, 10});
  const ValueId buffer = g.buffer("b", {10});
  const Graph graph = g.build();
  EXPECT_EQ(parameter_bytes(graph.values[weight], 2).total(), 400 + 400 + 800);
  EXPECT_EQ(parameter_bytes(graph.values[weight], 0).total(), 800);
  EXPECT_EQ(parameter_bytes(graph.values[buffer], 2).total(), 40);
}

}  // namespace
}  // namespace smp::partitioner
