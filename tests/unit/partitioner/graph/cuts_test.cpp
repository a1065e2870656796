// Where a program may be cut: written storages, values that cannot travel, gradients through writes.
#include "partitioner/graph/cuts.h"

#include <gtest/gtest.h>

#include <string>

#include "partitioner/graph/gradient_flow.h"
#include "tests/support/graph_builder.h"

namespace smp::partitioner {
namespace {

using smp::testing::contiguous_spec;
using smp::testing::GraphBuilder;

/// One character per position: '|' where a cut may lie.
std::string cuts_of(const GraphBuilder& builder) {
  std::string text;
  for (char allowed : allowed_cuts(builder.build())) text += allowed ? '|' : '.';
  return text;
}

TEST(Cuts, PlainChainMayBeCutEverywhere) {
  GraphBuilder g;
  g.relu(g.relu(g.relu(g.input({4}))));
  EXPECT_EQ(cuts_of(g), "||||");
}

TEST(Cuts, NoneBetweenCreationAndInPlaceWrite) {
  GraphBuilder g;
  const ValueId a = g.relu(g.input({4}));
  const ValueId b = g.in_place("aten::add_", a);
  g.relu(b);
  EXPECT_EQ(cuts_of(g), "|.||");
}

TEST(Cuts, ReaderBeforeTheLastWriteStaysWithTheWriter) {
  GraphBuilder g;
  const ValueId a = g.relu(g.input({4}));
  g.relu(a);
  g.relu(g.input({4}));
  g.in_place("aten::add_", a);
  g.relu(a);
  EXPECT_EQ(cuts_of(g), "|...||");
}

TEST(Cuts, WriteThroughAViewCountsForItsBase) {
  GraphBuilder g;
  const ValueId a = g.relu(g.input({4, 6}));
  const ValueId v = g.view("aten::view", a, contiguous_spec({24}));
  g.in_place("aten::mul_", v);
  g.relu(a);
  EXPECT_EQ(cuts_of(g), "|..||");
}

TEST(Cuts, ViewFromBeforeAWriteIsReadWhereItWasMade) {
  GraphBuilder g;
  const ValueId a = g.relu(g.input({4, 6}));
  const ValueId v = g.view("aten::view", a, contiguous_spec({24}));
  g.in_place("aten::mul_", a);
  g.relu(v);
  EXPECT_EQ(cuts_of(g), "|...|");
}

TEST(Cuts, OutputWrittenByItsOwnCreatorIsNoWrite) {
  GraphBuilder g;
  const ValueId a = g.op("aten::zeros", {}, {4});
  g.last_node().written_storages = {g.build().values[a].storage};
  g.relu(a);
  EXPECT_EQ(cuts_of(g), "|||");
}

TEST(Cuts, WrittenBufferKeepsAllItsReadersTogether) {
  GraphBuilder g;
  const ValueId mean = g.buffer("mean", {4});
  const ValueId x = g.relu(g.input({4}));
  g.in_place("aten::add_", mean, {x});
  const ValueId y = g.relu(x);
  g.op("aten::sub", {y, mean}, {4});
  EXPECT_EQ(cuts_of(g), "||..|");
}

TEST(Cuts, BatchNormAloneForbidsNothing) {
  GraphBuilder g;
  g.relu(g.batch_norm(g.relu(g.input({2, 4})), "bn"));
  EXPECT_EQ(cuts_of(g), "||||");
}

TEST(Cuts, BatchNormUsedTwiceStaysOnOneStage) {
  GraphBuilder g;
  const ValueId mean = g.buffer("mean", {4});
  const int32_t storage = g.build().values[mean].storage;
  ValueId x = g.relu(g.input({2, 4}));
  for (int i = 0; i < 2; ++i) {
    x = g.op("aten::batch_norm", {x, mean}, {2, 4});
    g.last_node().written_storages = {storage};
    x = g.relu(x);
  }
  EXPECT_EQ(cuts_of(g), "||..||");
}

TEST(Cuts, SliceOfABiggerTensorStaysWithItsReaders) {
  GraphBuilder g;
  const ValueId a = g.relu(g.input({4, 6}));
  TensorSpec second_half = contiguous_spec({2, 6});
  second_half.storage_offset = 12;
  const ValueId slice = g.view("aten::slice", a, second_half);
  g.relu(g.input({4}));
  g.relu(slice);
  EXPECT_EQ(cuts_of(g), "||..|");  // before the view the base travels, whole
}

TEST(Cuts, FirstHalfWithoutOffsetIsStillASlice) {
  GraphBuilder g;
  const ValueId a = g.relu(g.input({4, 6}));
  g.relu(g.view("aten::slice", a, contiguous_spec({2, 6})));
  EXPECT_EQ(cuts_of(g), "||.|");
}

TEST(Cuts, TransposedAndExpandedValuesTravel) {
  GraphBuilder g;
  const ValueId a = g.relu(g.input({4, 6}));
  TensorSpec transposed = contiguous_spec({6, 4});
  transposed.strides = {1, 6};
  g.relu(g.view("aten::t", a, transposed));
  const ValueId b = g.relu(g.input({4, 1}));
  TensorSpec expanded = contiguous_spec({4, 9});
  expanded.strides = {1, 0};
  g.relu(g.view("aten::expand", b, expanded));
  EXPECT_EQ(cuts_of(g), "|||||||");
}

TEST(Cuts, OverlappingViewStaysWithItsReaders) {
  GraphBuilder g;
  const ValueId a = g.relu(g.input({6}));
  TensorSpec windows = contiguous_spec({4, 3});
  windows.strides = {1, 1};
  g.relu(g.view("aten::unfold", a, windows));
  EXPECT_EQ(cuts_of(g), "||.|");
}

TEST(Cuts, ViewOfAParameterIsNotSent) {
  GraphBuilder g;
  const ValueId weight = g.parameter("w", {4, 6});
  TensorSpec transposed = contiguous_spec({6, 4});
  transposed.strides = {1, 6};
  const ValueId t = g.view("aten::t", weight, transposed);
  g.op("aten::mm", {g.input({2, 6}), t}, {2, 4});
  EXPECT_EQ(cuts_of(g), "|.|");
}

TEST(Cuts, ViewOfAConstantIsSent) {
  GraphBuilder g;
  const ValueId mask = g.view("aten::unsqueeze", g.constant({4, 4}), contiguous_spec({1, 4, 4}));
  g.relu(mask);
  g.relu(mask);
  EXPECT_EQ(cuts_of(g), "||||");
}

TEST(Cuts, GroupsNameTheirFirstNode) {
  GraphBuilder g;
  g.relu(g.input({4}));
  const ValueId a = g.relu(g.input({4}));
  g.relu(g.input({4}));
  g.in_place("aten::add_", a);
  EXPECT_EQ(node_groups(g.build()), (std::vector<NodeId>{0, 1, 2, 1}));
}

TEST(GradientFlow, StopsWhereNothingRequiresAGradient) {
  GraphBuilder g;
  const ValueId x = g.input({4});
  const ValueId frozen = g.relu(x);
  const ValueId trained = g.op("aten::mul", {frozen, g.parameter("w", {4})}, {4});
  const ValueId unused = g.relu(trained);
  const ValueId loss = g.sum(trained);
  const Graph graph = g.build(loss);
  const GradientFlow gradients(graph);
  EXPECT_TRUE(gradients.receives_gradient(trained));
  EXPECT_FALSE(gradients.receives_gradient(frozen));
  EXPECT_FALSE(gradients.receives_gradient(x));
  EXPECT_FALSE(gradients.receives_gradient(unused));
}

TEST(GradientFlow, DetachStopsIt) {
  GraphBuilder g;
  const ValueId a = g.relu(g.parameter("w", {4}));
  const ValueId b = g.op("aten::detach", {a}, {4});
  g.spec(b).requires_grad = false;
  const ValueId loss = g.sum(g.op("aten::mul", {b, g.parameter("v", {4})}, {4}));
  const Graph graph = g.build(loss);
  EXPECT_FALSE(GradientFlow(graph).receives_gradient(a));
}

TEST(GradientFlow, ReachesWhatWasCopiedIntoAnEmptyTensor) {
  GraphBuilder g;
  const ValueId row = g.relu(g.parameter("w", {6}));
  const ValueId table = g.op("aten::zeros", {}, {4, 6});  // recorded without requires_grad
  TensorSpec first_row = contiguous_spec({6});
  const ValueId view = g.view("aten::select", table, first_row);
  g.in_place("aten::copy_", view, {row});
  const ValueId loss = g.sum(table);
  g.spec(loss).requires_grad = true;
  const Graph graph = g.build(loss);
  const GradientFlow gradients(graph);
  EXPECT_TRUE(gradients.receives_gradient(table));
  EXPECT_TRUE(gradients.receives_gradient(row));
}

TEST(GradientFlow, EvaluationHasNone) {
  GraphBuilder g;
  const ValueId a = g.relu(g.parameter("w", {4}));
  const Graph graph = g.build();
  EXPECT_FALSE(GradientFlow(graph).receives_gradient(a));
}

}  // namespace
}  // namespace smp::partitioner
