// What autocast adds to the costs of an operator, against numbers worked out by hand.
#include <gtest/gtest.h>

#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/operator_cost.h"
#include "tests/support/graph_builder.h"

namespace smp::partitioner {
namespace {

using smp::testing::GraphBuilder;

OperatorCost cost_of_last_node(const GraphBuilder& builder) {
  const Graph graph = builder.build();
  return operator_cost(graph, graph.nodes.back(), /*trains=*/true);
}

int64_t saved_by_last_node(const GraphBuilder& builder, ValueId root) {
  return activation_bytes(builder.build(root)).back();
}

TEST(AutocastCost, ProductsOf16BitsCountByThemselvesWithWhatAutocastCasts) {
  GraphBuilder g;
  const ValueId x = g.op("aten::relu", {g.parameter("p", {8, 16})}, {8, 16});
  const ValueId y = g.linear(x, "fc", 32);
  const OperatorCost plain = cost_of_last_node(g);
  g.last_node().autocast.enabled = true;
  EXPECT_EQ(cost_of_last_node(g), plain);  // an operator that autocast leaves in 32 bits
  g.spec(y).dtype = c10::ScalarType::BFloat16;
  const OperatorCost cast = cost_of_last_node(g);
  EXPECT_EQ(cast.forward.flops, 0);
  EXPECT_EQ(cast.forward.half_flops, plain.forward.flops);
  EXPECT_EQ(cast.backward.half_flops, plain.backward.flops);
  const double operands = 8 * 16 + 32 * 16 + 32;
  EXPECT_EQ(cast.forward.kernels, plain.forward.kernels + 3);
  const double result = 2 * 8 * 32;  // bytes less
  EXPECT_EQ(cast.forward.bytes, plain.forward.bytes + 2 * 2 * operands - result);
  EXPECT_EQ(cast.backward.bytes, plain.backward.bytes + 2 * 2 * operands - 3 * result);
  g.spec(x).dtype = c10::ScalarType::BFloat16;
  EXPECT_EQ(cost_of_last_node(g).forward.kernels, plain.forward.kernels + 2);
  g.last_node().autocast.enabled = false;
  EXPECT_EQ(cost_of_last_node(g).forward.flops, 0);
  EXPECT_EQ(cost_of_last_node(g).forward.kernels, plain.forward.kernels);
}

TEST(AutocastCost, ProductUnderAutocastKeepsCopiesOf16BitsOfBothFactors) {
  GraphBuilder g;
  const ValueId x = g.relu(g.parameter("p", {8, 16}));
  const ValueId y = g.linear_with(x, g.parameter("w", {32, 16}));
  const int64_t plain = saved_by_last_node(g, y);
  EXPECT_EQ(plain, 0);  // the input is kept by relu, the weight stays
  g.last_node().autocast.enabled = true;
  EXPECT_EQ(saved_by_last_node(g, y), plain);
  g.spec(y).dtype = c10::ScalarType::BFloat16;
  EXPECT_EQ(saved_by_last_node(g, y), 2 * (8 * 16 + 32 * 16));
}

TEST(AutocastCost, MixedOperandsOfAnElementwiseProductAreKeptAsTheyAre) {
  GraphBuilder g;
  const ValueId half = g.op("aten::add", {g.parameter("p", {100})}, {100});
  g.spec(half).dtype = c10::ScalarType::BFloat16;
  const ValueId y = g.op("aten::mul", {half, g.parameter("scale", {100})}, {100});
  g.last_node().autocast.enabled = true;
  EXPECT_EQ(saved_by_last_node(g, y), 2 * 100);
}

}  // namespace
}  // namespace smp::partitioner
