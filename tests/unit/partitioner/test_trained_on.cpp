// Which ranks train a parameter that others read too.
#include <gtest/gtest.h>

#include "partitioner/plan/trained_on.h"
#include "tests/support/graph_builder.h"

namespace smp::partitioner {
namespace {

using smp::testing::GraphBuilder;
using Ranks = std::map<std::string, std::vector<int>>;

/// One operator for each rank.
Plan one_each(const Graph& graph) {
  Plan plan;
  plan.num_ranks = static_cast<int>(graph.nodes.size());
  for (int n = 0; n < plan.num_ranks; ++n) {
    StagePlan& stage = plan.stages.emplace_back();
    stage.rank = n;
    stage.nodes = {n};
  }
  return plan;
}

TEST(TrainedOn, IsWhereABackwardPassesTheParameter) {
  GraphBuilder g;
  const ValueId x = g.input({2, 4}), weight = g.parameter("tied", {4, 4});
  g.linear_with(x, weight);  // nothing goes on from here
  const Graph graph = g.build(g.linear_with(x, weight));
  EXPECT_EQ(trained_on(graph, one_each(graph)), (Ranks{{"tied", {1}}}));
}

TEST(TrainedOn, IsEveryRankOfATiedWeight) {
  GraphBuilder g;
  const ValueId x = g.input({2, 4}), weight = g.parameter("tied", {4, 4});
  const Graph graph = g.build(g.linear_with(g.relu(g.linear_with(x, weight)), weight));
  EXPECT_EQ(trained_on(graph, one_each(graph)), (Ranks{{"tied", {0, 2}}}));
}

TEST(TrainedOn, IsNothingForAFrozenParameterAndInEvaluation) {
  GraphBuilder g;
  const ValueId x = g.input({2, 4}), frozen = g.parameter("frozen", {4, 4}), weight = g.parameter("weight", {4, 4});
  g.spec(frozen).requires_grad = false;
  const ValueId y = g.linear_with(g.linear_with(x, frozen), weight);
  const Graph training = g.build(y), evaluation = g.build();
  EXPECT_EQ(trained_on(training, one_each(training)), (Ranks{{"weight", {1}}}));
  EXPECT_EQ(trained_on(evaluation, one_each(evaluation)), Ranks{});
}

}  // namespace
}  // namespace smp::partitioner
