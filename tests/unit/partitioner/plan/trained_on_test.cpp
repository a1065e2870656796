// Which ranks train a parameter that others read too, and how exact ties give its gradient to one of them.
#include "partitioner/plan/trained_on.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "partitioner/plan/check_plan.h"
#include "partitioner/plan/derive.h"
#include "partitioner/plan/linearise.h"
#include "tests/support/graph_builder.h"
#include "tests/support/plan_cases.h"

namespace smp::partitioner {
namespace {

using smp::testing::GraphBuilder;
using smp::testing::on_ranks;
using smp::testing::refusal_of;
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

/// linear(weight i) between linears of one weight, `calls` of these.
Graph called(int calls) {
  GraphBuilder g;
  const ValueId weight = g.parameter("tied", {16, 16});
  ValueId x = g.input({64, 16});
  for (int i = 0; i < calls; ++i) x = g.linear(g.linear_with(x, weight), "own" + std::to_string(i), 16);
  return g.build(g.sum(x));
}

/// "own0" on rank 0, "own1" on rank 1, and so on; the tied weight on all.
PartitionOptions own_on_ranks(int num_ranks) {
  PartitionOptions options = on_ranks(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (const char* name : {".weight", ".bias"}) options.placement.homes["own" + std::to_string(rank) + name] = {{rank}};
  }
  options.placement.homes["tied"] = TensorHome::on_all(num_ranks);
  return options;
}

TEST(ExactTies, RelayTheGradientFromTheLastReaderToTheFirst) {
  const Graph graph = called(3);
  PartitionOptions options = own_on_ranks(3);
  const auto relays_of_tied = [&](const Plan& plan) {
    std::vector<Transfer> relays;
    for (const Transfer& relay : plan.gradients) {
      if (graph.values[relay.value].name == "tied") relays.push_back(relay);
    }
    return relays;
  };
  const Plan copies = partition(graph, options);
  check(graph, copies);
  EXPECT_TRUE(relays_of_tied(copies).empty());
  EXPECT_GT(trained_on(graph, copies).at("tied").size(), 1U);

  options.request.exact_ties = true;
  const Plan plan = partition(graph, options);
  check(graph, plan);
  const std::vector<Transfer> relays = relays_of_tied(plan);
  ASSERT_FALSE(relays.empty());
  for (size_t i = 1; i < relays.size(); ++i) EXPECT_EQ(relays[i].source, relays[i - 1].target);
  EXPECT_EQ(trained_on(graph, plan).at("tied"), std::vector<int>{plan.stages[relays.back().target].rank});
  EXPECT_GT(plan.stages[relays.front().source].cost.send_us, copies.stages[relays.front().source].cost.send_us);

  Plan other = plan;
  other.exact_ties = false;
  derive(graph, other);
  EXPECT_EQ(other.gradients, copies.gradients);
}

// A second visit of the first rank would have nearly all of the work.
TEST(ExactTies, LeaveABlockThatIsCalledAgainOnAllRanks) {
  const Graph graph = called(6);
  for (const int num_ranks : {2, 3}) {
    PartitionOptions options = on_ranks(num_ranks);
    options.request.exact_ties = true;
    EXPECT_EQ(partition(graph, options).stages.size(), static_cast<size_t>(num_ranks));
  }
}

// A weight's gradient adds up in program order, whatever the order of the operators is; a frozen one has none.
TEST(ExactTies, KeepTheReadersInProgramOrder) {
  for (const bool is_frozen : {false, true}) {
    GraphBuilder g;
    const ValueId x = g.input({8, 16}), weight = g.parameter("tied", {16, 16});
    g.spec(weight).requires_grad = !is_frozen;
    const ValueId b = g.linear(x, "b", 16);
    const ValueId first = g.linear_with(x, weight), second = g.linear_with(b, weight);
    const ValueId third = g.linear_with(first, weight);
    const Graph graph = g.build(g.sum(g.op("aten::add", {second, third}, {8, 16})));
    bool is_other_order = false;
    for (const Linearisation& order : linearisations(graph, std::vector<double>(graph.nodes.size(), 1.0))) {
      const auto position = [&](ValueId id) {
        return std::find(order.nodes.begin(), order.nodes.end(), graph.values[id].producer);
      };
      is_other_order |= !(position(first) < position(second) && position(second) < position(third));
    }
    EXPECT_EQ(is_other_order, is_frozen);
  }
}

// Microbatches of one step may run several programs, and one rank must add up what they make.
TEST(ExactTies, BeginWhereOtherProgramsAddUpTheGradient) {
  const Graph graph = called(2);
  PartitionOptions options = own_on_ranks(2);
  options.request.exact_ties = true;
  for (const int home : {0, 1}) {
    options.placement.adders["tied"] = home;
    const Plan plan = partition(graph, options);
    check(graph, plan);
    EXPECT_EQ(trained_on(graph, plan).at("tied"), std::vector<int>{home});
  }
}

TEST(ExactTies, AreRefusedWhereTheFirstReaderCannotLieThere) {
  GraphBuilder g;
  const ValueId x = g.input({8, 16}), tied = g.parameter("tied", {16, 16}), bias = g.parameter("own1.bias", {16});
  const Graph graph = g.build(g.sum(g.op("aten::linear", {x, tied, bias}, {8, 16})));
  PartitionOptions options = own_on_ranks(2);
  options.request.exact_ties = true;
  check(graph, partition(graph, options));
  options.placement.adders["tied"] = 0;
  const std::string refusal = refusal_of([&] { partition(graph, options); });
  EXPECT_NE(refusal.find("got 'own1.bias' on rank 1 and 'tied' on rank 0, where exact_tied_weights adds up its gradient in "
                         "other programs. Set exact_tied_weights to false"),
            std::string::npos)
      << refusal;
}

}  // namespace
}  // namespace smp::partitioner
