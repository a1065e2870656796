// Plans of small graphs: stages, transfers, relays, pins, homes, memory.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "partitioner/partition/edit_distance.h"
#include "partitioner/partition/graph_costs.h"
#include "partitioner/partition/partition.h"
#include "partitioner/partition/visits.h"
#include "partitioner/plan/check_plan.h"
#include "partitioner/plan/linearise.h"
#include "tests/support/graph_builder.h"
#include "tests/support/plan_cases.h"

namespace smp::partitioner {
namespace {

using smp::testing::GraphBuilder;
using smp::testing::mlp;
using smp::testing::on_ranks;
using smp::testing::refusal_of;
using smp::testing::Skip;

std::vector<int> ranks_of_nodes(const Plan& plan) {
  std::vector<int> ranks;
  for (int stage : plan.stage_of_node) ranks.push_back(plan.stages[stage].rank);
  return ranks;
}

TEST(Partition, OneRankRunsEverythingAndSendsNothing) {
  const Graph graph = mlp(3);
  const Plan plan = partition(graph, on_ranks(1));
  check(graph, plan);
  ASSERT_EQ(plan.stages.size(), 1u);
  EXPECT_EQ(plan.stages[0].cost.send_us, 0);
  EXPECT_TRUE(plan.gradients.empty());
  EXPECT_EQ(plan.activations, (std::vector<Transfer>{{graph.inputs[0], kInputStage, 0}}));
  EXPECT_NEAR(plan.slowest_stage_us, plan.lower_bound_us, 1e-9);
}

TEST(Partition, EveryRankGetsAStageWhileThereAreOperators) {
  for (int num_ranks : {2, 3, 4, 5, 8}) {
    const Graph graph = mlp(8);
    const Plan plan = partition(graph, on_ranks(num_ranks));
    check(graph, plan);
    ASSERT_EQ(static_cast<int>(plan.stages.size()), num_ranks);
    for (int s = 0; s < num_ranks; ++s) EXPECT_EQ(plan.stages[s].rank, s);
    EXPECT_GE(plan.slowest_stage_us, plan.lower_bound_us);
  }
}

TEST(Partition, MoreRanksThanOperatorsLeavesRanksWithoutStage) {
  GraphBuilder g;
  const Graph graph = g.build(g.sum(g.linear(g.input({4, 4}), "fc", 4)));
  const Plan plan = partition(graph, on_ranks(5));
  check(graph, plan);
  EXPECT_EQ(plan.stages.size(), 2u);
  EXPECT_EQ(plan.num_ranks, 5);
  EXPECT_EQ(plan.predicted_peak_bytes.size(), 5u);
}

TEST(Partition, ChainSendsOneValueForwardAndItsGradientBack) {
  const Graph graph = mlp(2);
  const Plan plan = partition(graph, on_ranks(2));
  ASSERT_EQ(plan.activations.size(), 2u);  // the input, and the value at the cut
  ASSERT_EQ(plan.gradients.size(), 1u);
  const Transfer forward = plan.activations[1], backward = plan.gradients[0];
  EXPECT_EQ(forward, (Transfer{backward.value, backward.target, backward.source}));
}

TEST(Partition, SkipIsRelayedFromTheLastReaderThroughTheOthers) {
  const Skip skip;
  PartitionOptions options = on_ranks(4);
  options.placement.homes = {{"shared.weight", {{0, 2}}}, {"b.weight", {{1}}}, {"b.bias", {{1}}}};
  Plan plan = partition(skip.graph, options);
  check(skip.graph, plan);
  EXPECT_EQ(ranks_of_nodes(plan), (std::vector<int>{0, 1, 2, 2, 2}));
  EXPECT_EQ(plan.activations,
            (std::vector<Transfer>{{skip.x, kInputStage, 0}, {skip.a, 0, 1}, {skip.a, 0, 2}, {skip.b, 1, 2}}));
  EXPECT_EQ(plan.gradients, (std::vector<Transfer>{{skip.a, 2, 1}, {skip.a, 1, 0}, {skip.b, 2, 1}}));
}

TEST(Partition, EvaluationHasNoRelays) {
  Skip skip;
  const Plan plan = partition(skip.g.build(), on_ranks(3));
  EXPECT_TRUE(plan.gradients.empty());
  for (const StagePlan& stage : plan.stages) {
    EXPECT_EQ(stage.cost.backward_us, 0);
    EXPECT_EQ(stage.cost.activation_bytes, 0);
  }
}

TEST(Partition, TiedWeightIsHeldByBothStages) {
  const Skip skip;
  PartitionOptions options = on_ranks(2);
  options.placement.homes = {{"shared.weight", {{0, 1}}}, {"b.weight", {{1}}}, {"b.bias", {{1}}}};
  const Plan plan = partition(skip.graph, options);
  for (const StagePlan& stage : plan.stages) {
    EXPECT_EQ(std::count(stage.parameters.begin(), stage.parameters.end(), skip.weight), 1);
  }
}

TEST(Partition, InPlaceWriteIsNeverSeparatedFromItsStorage) {
  GraphBuilder g;
  ValueId x = g.linear(g.input({128, 64}), "a", 64);
  for (int i = 0; i < 4; ++i) {
    const ValueId branch = g.linear(x, std::string("b").append(std::to_string(i)), 64);
    x = g.in_place("aten::add_", x, {branch});
  }
  x = g.linear(x, "c", 64);
  const Graph graph = g.build(g.sum(x));
  const Plan plan = partition(graph, on_ranks(3));
  check(graph, plan);
  for (int n = 0; n < 9; ++n) EXPECT_EQ(plan.stage_of_node[n], 0) << n;
}

TEST(Partition, MonotonePinsAreKeptAndTheRestIsBalanced) {
  const Graph graph = mlp(8);
  PartitionOptions options = on_ranks(3);
  options.placement.pins = {{"layers.0", 0}, {"layers.1", 1}, {"layers.7", 2}};
  const Plan plan = partition(graph, options);
  check(graph, plan);
  const std::vector<int> ranks = ranks_of_nodes(plan);
  EXPECT_EQ(ranks[0], 0);
  EXPECT_EQ(ranks[2], 1);
  EXPECT_EQ(ranks[14], 2);
  ASSERT_EQ(plan.stages.size(), 3u);
}

TEST(Partition, PinsAgainstTheOrderBecomeVisits) {
  const Graph graph = mlp(3);
  PartitionOptions options = on_ranks(2);
  options.placement.pins = {{"layers.0", 0}, {"layers.1", 1}, {"layers.2", 0}};
  const Plan plan = partition(graph, options);
  check(graph, plan);
  ASSERT_EQ(plan.stages.size(), 3u);
  EXPECT_EQ(plan.stages[0].rank, 0);
  EXPECT_EQ(plan.stages[1].rank, 1);
  EXPECT_EQ(plan.stages[2].rank, 0);
}

TEST(Partition, LongestPrefixWinsAndDotsSeparate) {
  GraphBuilder g;
  ValueId x = g.linear(g.input({8, 8}), "net", 8);
  x = g.linear(x, "net.deep", 8);
  x = g.linear(x, "network", 8);
  const Graph graph = g.build(g.sum(x));
  PartitionOptions options = on_ranks(3);
  options.placement.auto_partition = false;
  options.placement.pins = {{"net", 1}, {"net.deep", 2}};
  EXPECT_EQ(ranks_of_nodes(partition(graph, options)), (std::vector<int>{1, 2, 0, 0}));
}

TEST(Partition, ManualPlacementSendsTheRestToTheDefault) {
  const Graph graph = mlp(3);
  PartitionOptions options = on_ranks(3);
  options.placement.auto_partition = false;
  options.placement.default_partition = 2;
  options.placement.pins = {{"layers.1", 0}};
  const Plan plan = partition(graph, options);
  check(graph, plan);
  const std::vector<int> ranks = ranks_of_nodes(plan);
  EXPECT_EQ(ranks[0], 2);
  EXPECT_EQ(ranks[2], 0);
  EXPECT_EQ(ranks[4], 2);
}

TEST(Partition, ParameterFreeOperatorGoesWhereLessIsSent) {
  GraphBuilder g;
  const ValueId a = g.linear(g.input({8, 64}), "a", 64);
  const ValueId pooled = g.op("aten::mean", {a}, {8, 4});
  const ValueId wide = g.op("aten::repeat", {pooled}, {8, 64});
  const Graph graph = g.build(g.sum(g.linear(wide, "b", 64)));
  PartitionOptions options = on_ranks(2);
  options.placement.homes = {{"a.weight", {{0}}}, {"a.bias", {{0}}}, {"b.weight", {{1}}}, {"b.bias", {{1}}}};
  EXPECT_EQ(ranks_of_nodes(partition(graph, options)), (std::vector<int>{0, 0, 1, 1, 1}));
}

TEST(CutTraffic, CountsGradientsOnTheirWayBack) {
  GraphBuilder g;
  const ValueId frozen = g.relu(g.input({100}));
  const ValueId trained = g.op("aten::mul", {frozen, g.parameter("w", {50})}, {50});
  const Graph graph = g.build(g.sum(trained));
  const DeviceModel device;
  const std::vector<double> traffic_us = cut_traffic_us(graph, device, program_order(graph).nodes);
  EXPECT_EQ(traffic_us, (std::vector<double>{0, device.message_us(400), 2 * device.message_us(200), 0}));
}

TEST(Partition, SecondGraphFollowsThePlacementOfTheFirst) {
  const Graph graph = mlp(6);
  const Plan first = partition(graph, on_ranks(3));
  PartitionOptions options = on_ranks(3);
  std::map<std::string, std::vector<int>> ranks;
  for (const StagePlan& stage : first.stages) {
    for (ValueId id : stage.parameters) ranks[graph.values[id].name].push_back(stage.rank);
  }
  options.placement.homes = {ranks.begin(), ranks.end()};
  Graph evaluation = graph;
  evaluation.backward_roots.clear();
  const Plan second = partition(evaluation, options);
  check(evaluation, second);
  for (size_t s = 0; s < first.stages.size(); ++s) {
    EXPECT_EQ(second.stages[s].parameters, first.stages[s].parameters);
  }
}

TEST(Partition, PinsOfOperatorsThatMustStayTogetherNameBoth) {
  GraphBuilder g;
  const ValueId x = g.linear(g.input({8, 8}), "a", 8);
  g.in_place("aten::add_", x, {g.parameter("b.shift", {8})});
  const Graph graph = g.build(g.sum(x));
  PartitionOptions options = on_ranks(2);
  options.placement.pins = {{"a", 0}, {"b", 1}};
  const std::string text = refusal_of([&] { partition(graph, options); });
  EXPECT_NE(text.find("'a.weight' on rank 0 and 'b.shift' on rank 1"), std::string::npos) << text;
}

TEST(Partition, UnknownModuleInAPinSuggestsTheClosest) {
  PartitionOptions options = on_ranks(2);
  options.placement.pins = {{"layer.1", 1}};
  const std::string text = refusal_of([&] { partition(mlp(3), options); });
  EXPECT_NE(text.find("got 'layer.1'. Did you mean 'layers.1'?"), std::string::npos) << text;
  options.placement.known_modules = {"layer.1"};  // exists, but this step does not use it
  EXPECT_EQ(refusal_of([&] { partition(mlp(3), options); }), "");
}

TEST(EditDistance, CountsASwapOfNeighboursOnce) {
  EXPECT_EQ(edit_distance("layers", "layers"), 0U);
  EXPECT_EQ(edit_distance("layesr", "layers"), 1U);
  EXPECT_EQ(edit_distance("layer", "layers.1"), 3U);
  EXPECT_EQ(edit_distance("", "ab"), 2U);
}

TEST(Partition, RankOutOfRangeIsRefused) {
  PartitionOptions options = on_ranks(2);
  options.placement.pins = {{"layers.1", 2}};
  EXPECT_NE(refusal_of([&] { partition(mlp(3), options); }).find("rank from 0 to 1"), std::string::npos);
  options.placement.pins = {};
  options.placement.auto_partition = false;
  options.placement.default_partition = -1;
  EXPECT_NE(refusal_of([&] { partition(mlp(3), options); }).find("default_partition"), std::string::npos);
}

/// By trying every assignment.
double least_cost(const std::vector<RankSet>& allowed, const std::vector<double>& switch_us, double step_back_us,
                  int num_ranks, size_t block = 0, int before = -1) {
  if (block == allowed.size()) return 0;
  double least = 1e300;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const RankSet& set = allowed[block];
    if (!set.empty() && std::find(set.begin(), set.end(), rank) == set.end()) continue;
    const bool changes = before >= 0 && rank != before;
    const double change_us = changes ? switch_us[block] + (rank < before ? step_back_us : 0) : 0;
    least = std::min(least, change_us + least_cost(allowed, switch_us, step_back_us, num_ranks, block + 1, rank));
  }
  return least;
}

TEST(Visits, EqualExhaustiveSearchOn300RandomPlacements) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const int num_ranks = 1 + static_cast<int>(random() % 4);
    std::vector<RankSet> allowed(1 + random() % 6);
    std::vector<double> switch_us;
    for (RankSet& set : allowed) {
      switch_us.push_back(static_cast<double>(random() % 9));
      for (int rank = 0; rank < num_ranks; ++rank) {
        if (random() % 3 == 0) set.push_back(rank);
      }
    }
    const std::vector<int> ranks = cheapest_ranks(allowed, switch_us, 2, num_ranks);
    std::vector<RankSet> fixed;
    for (size_t b = 0; b < ranks.size(); ++b) {
      fixed.push_back({ranks[b]});
      const RankSet& set = allowed[b];
      EXPECT_TRUE(set.empty() || std::find(set.begin(), set.end(), ranks[b]) != set.end());
    }
    EXPECT_EQ(least_cost(fixed, switch_us, 2, num_ranks), least_cost(allowed, switch_us, 2, num_ranks)) << "trial " << trial;
  }
}

TEST(Partition, EmptyGraphIsRefused) {
  EXPECT_NE(refusal_of([] { partition(Graph{}, on_ranks(2)); }), "");
}

TEST(Partition, MemoryLimitThatRefusesNamesOneThatWorks) {
  const Graph graph = mlp(6);
  PartitionOptions options = on_ranks(3);
  options.request.memory_limit_bytes = 1000;
  const std::string text = refusal_of([&] { partition(graph, options); });
  const std::string before_number = "at least ";
  ASSERT_NE(text.find(before_number), std::string::npos) << text;
  options.request.memory_limit_bytes = std::stoll(text.substr(text.find(before_number) + before_number.size()));
  const Plan plan = partition(graph, options);
  for (int64_t bytes : plan.predicted_peak_bytes) EXPECT_LE(bytes, options.request.memory_limit_bytes);
}

TEST(Partition, TwoVisitsOfARankHoldASharedWeightOnceAndSendNothingToEachOther) {
  const Skip skip;
  PartitionOptions options = on_ranks(2);
  options.placement.pins = {{"shared", 0}, {"b", 1}};
  const Plan plan = partition(skip.graph, options);
  ASSERT_EQ(plan.stages.size(), 3u);
  const int64_t shared_bytes = 2 * 4 * 16 * 16;  // weight and gradient
  const auto& first = plan.stages[0].cost;
  const auto& last = plan.stages[2].cost;
  EXPECT_EQ(last.message_bytes, 0);  // those of the rank are on its first stage
  const int64_t held = shared_bytes + 4 * (4 * 8 * 16) + first.message_bytes;
  EXPECT_GE(plan.predicted_peak_bytes[0], held);
  // At most two in flight, each with the value that goes from visit to visit and the shared
  // weight's gradient on its way, and a margin.
  const int64_t most = held + shared_bytes + 4 * 8 + 2 * (first.activation_bytes + last.activation_bytes) + 4 * 8 * 16 * 2 +
                       std::max(first.workspace_bytes, last.workspace_bytes);
  EXPECT_LE(plan.predicted_peak_bytes[0], most + (most + 31) / 32);
  // Between ranks: a and b, forward and backward; a also goes from visit 0 to visit 2 within rank 0.
  const double message_us = options.machine.device.message_us(4 * 8 * 16);
  EXPECT_DOUBLE_EQ(plan.stages[1].cost.send_us, 5 * message_us);
  EXPECT_DOUBLE_EQ(plan.stages[0].cost.send_us, 2 * message_us);
}

}  // namespace
}  // namespace smp::partitioner
