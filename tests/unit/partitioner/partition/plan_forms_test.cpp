// What consumers of a plan rely on: consistency, its text, its table.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>

#include "partitioner/partition/partition.h"
#include "partitioner/plan/check_plan.h"
#include "partitioner/plan/derive.h"
#include "partitioner/plan/plan_io.h"
#include "partitioner/report/partition_table.h"
#include "tests/support/graph_builder.h"
#include "tests/support/plan_cases.h"

namespace smp::partitioner {
namespace {

using smp::testing::contiguous_spec;
using smp::testing::GraphBuilder;
using smp::testing::mlp;
using smp::testing::on_ranks;
using smp::testing::refusal_of;
using smp::testing::Skip;

TEST(CheckPlan, RefusesEveryKindOfContradiction) {
  const Graph graph = mlp(4);
  const Plan good = partition(graph, on_ranks(3));
  const auto refused = [&](const std::function<void(Plan&)>& damage) {
    Plan plan = good;
    damage(plan);
    return !refusal_of([&] { derive(graph, plan), check(graph, plan); }).empty();
  };
  EXPECT_FALSE(refused([](Plan&) {}));
  EXPECT_TRUE(refused([](Plan& p) { std::swap(p.stage_of_node.front(), p.stage_of_node.back()); }));
  EXPECT_TRUE(refused([](Plan& p) { p.stages[1].rank = 3; }));
  EXPECT_TRUE(refused([](Plan& p) { p.stages[1].rank = -1; }));
  EXPECT_TRUE(refused([](Plan& p) { p.stages.emplace_back(); }));
  EXPECT_TRUE(refused([](Plan& p) { p.stage_of_node.pop_back(); }));
  EXPECT_TRUE(refused([](Plan& p) { p.stage_of_node.back() = 3; }));
}

TEST(Derive, MakesAgainWhatAPlanHas) {
  const Skip skip;
  const Plan plan = partition(skip.graph, on_ranks(3));
  Plan bare = plan;
  bare.activations.clear(), bare.gradients.clear();
  for (StagePlan& stage : bare.stages)
    stage = {.rank = stage.rank, .nodes = {}, .parameters = {}, .modules = {}, .cost = stage.cost};
  derive(skip.graph, bare);
  EXPECT_EQ(bare, plan);
}

TEST(CheckPlan, RefusesAStorageThatIsWrittenOnTwoStages) {
  GraphBuilder g;
  const ValueId x = g.linear(g.input({8, 8}), "a", 8);
  g.in_place("aten::relu_", x);
  const Graph graph = g.build();
  Plan plan = partition(graph, on_ranks(1));
  plan.num_ranks = 2;
  plan.stages.push_back({.rank = 1, .nodes = {}, .parameters = {}, .modules = {}, .cost = {}});
  plan.stage_of_node = {0, 1};
  EXPECT_NE(refusal_of([&] { check(graph, plan); }).find("aten::relu_"), std::string::npos);
}

TEST(PlanIo, RoundTripIsExact) {
  const Skip skip;
  PartitionOptions options = on_ranks(3);
  options.machine.device.peak_gflops = 97.3;
  const Plan plan = partition(skip.graph, options);
  EXPECT_EQ(deserialise_plan(serialise(plan), skip.graph), plan);
}

TEST(PlanIo, DamagedTextNamesThePlace) {
  const Graph graph = mlp(2);
  const Plan plan = partition(graph, on_ranks(2));
  const auto expect_refused = [&](const std::string& from, const std::string& to, const std::string& part) {
    std::string text = serialise(plan);
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << text;
    text.replace(at, from.size(), to);
    const std::string refusal = refusal_of([&] { deserialise_plan(text, graph); });
    EXPECT_NE(refusal.find(part), std::string::npos) << refusal;
  };
  expect_refused("\"rank\":1", "\"rank\":7", "plan data: stages[1].rank: expected");
  expect_refused("{", "", "plan data: the text");
  expect_refused("\"stage_of_node\":[0,", "\"stage_of_node\":[", "a stage for each of");
  expect_refused("\"predicted_peak_bytes\":[", "\"predicted_peak_bytes\":[0,", "for each of 2 ranks, got 3");
  expect_refused("\"table\":[", "\"table\":[[]", "table: expected a column for each of 2 ranks, or none, got 1");
  expect_refused("\"table\":[", "\"table\":[[[0,0,2147483647]],[]",
                 "table[0][0][2]: expected an integer from 0 to 2147483646");
}

TEST(PartitionTable, ShowsStagesAndGap) {
  const Graph graph = mlp(4);
  const Plan plan = partition(graph, on_ranks(2));
  const std::string table = partition_table(graph, plan);
  EXPECT_NE(table.find("layers.0 .. layers.1"), std::string::npos) << table;
  EXPECT_NE(table.find("8.32 K"), std::string::npos) << table;
  EXPECT_NE(table.find("gap "), std::string::npos) << table;
  char bubble[32];
  std::snprintf(bubble, sizeof bubble, "bubble %.1f %%", 100 * plan.predicted_bubble);
  EXPECT_NE(table.find(bubble), std::string::npos) << table;
  EXPECT_GT(plan.predicted_bubble, 0.1);  // four microbatches on two ranks: at least 1/5
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 4);
  const std::string json = partition_table_json(graph, plan);
  EXPECT_NE(json.find("\"predicted_bubble\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"modules\":[\"layers.0\",\"layers.1\"]"), std::string::npos) << json;
}

TEST(PartitionTable, PrintsTheSimulatedTimeOfTheStep) {
  const Graph graph = mlp(4);
  PartitionOptions options = on_ranks(2);
  options.machine.device = {.body_us = 0, .link_gigabytes_per_s = 1e6, .link_latency_us = 0};
  const Plan plan = partition(graph, options);
  ASSERT_EQ(plan.stages.size(), 2U);
  // One forward one backward over four microbatches: the slower stage works without a pause, beside
  // one forward and backward of the faster.
  double slowest_us = 0, sum_us = 0;
  for (const StagePlan& stage : plan.stages) {
    const double us = stage.cost.forward_us + stage.cost.backward_us;
    slowest_us = std::max(slowest_us, us);
    sum_us += us;
  }
  EXPECT_GE(plan.predicted_step_us, 3 * slowest_us + sum_us - 1);
  EXPECT_LE(plan.predicted_step_us, 5 * slowest_us);
  options.machine.device.link_latency_us = 1000;  // four messages there and four back on the way
  EXPECT_GE(partition(graph, options).predicted_step_us, plan.predicted_step_us + 2000);
}

TEST(PartitionTable, GapIsNeverNegativeZeroAndNeverNegative) {
  const Graph graph = mlp(4);
  Plan plan = partition(graph, on_ranks(2));
  plan.slowest_stage_us = 100;
  plan.lower_bound_us = 100 * (1 + 1e-15);  // another order of additions
  EXPECT_NE(partition_table(graph, plan).find("gap 0.0 %"), std::string::npos) << partition_table(graph, plan);
  plan.lower_bound_us = 101;
  EXPECT_THROW(partition_table(graph, plan), c10::Error);
  plan.lower_bound_us = 0;
  EXPECT_EQ(gap_percent(plan), 0);
}

/// The simulated ranks carry all that the plan charges them: compute, and both ends of messages.
TEST(PredictedStep, IsNeverShorterThanTheWorkOfTheSlowestRank) {
  GraphBuilder g;
  const ValueId wide = g.input({512, 64});
  ValueId x = g.linear(g.input({4, 64}), "first", 64);
  for (int i = 0; i < 6; ++i) {
    const std::string name = std::string("l").append(std::to_string(i));
    x = g.linear(g.op("aten::add", {x, g.linear(wide, name, 64)}, {512, 64}), name + "o", 64);
  }
  const Graph graph = g.build(g.sum(x));
  for (int num_ranks : {2, 3, 4}) {
    for (const ScheduleKind kind : {ScheduleKind::kSimple, ScheduleKind::kInterleaved}) {
      PartitionOptions options = on_ranks(num_ranks);
      options.request.num_microbatches = 16;
      options.request.schedule.kind = kind;
      for (const double latency_us : {0.0, 5.0, 500.0}) {
        options.machine.device.link_latency_us = latency_us;
        const Plan plan = partition(graph, options);
        EXPECT_GE(plan.predicted_step_us, 16 * plan.slowest_stage_us * (1 - 1e-12))
            << num_ranks << " ranks, latency " << latency_us;
      }
    }
  }
}

TEST(Partition, LeaderPaysForTheStepInputsThatItSends) {
  GraphBuilder g;
  const ValueId a = g.linear(g.input({8, 16}), "a", 16);
  const ValueId side = g.input({8, 16});
  const ValueId b = g.linear(side, "b", 16);
  const Graph graph = g.build(g.sum(g.op("aten::add", {a, b}, {8, 16})));
  PartitionOptions options = on_ranks(2);
  options.placement.homes = {{"a.weight", {{0}}}, {"a.bias", {{0}}}, {"b.weight", {{1}}}, {"b.bias", {{1}}}};
  const Plan plan = partition(graph, options);
  const double message_us = options.machine.device.message_us(4 * 8 * 16);
  ASSERT_EQ(plan.stages.size(), 2U);
  EXPECT_DOUBLE_EQ(plan.stages[0].cost.send_us, plan.stages[1].cost.send_us);
  EXPECT_DOUBLE_EQ(plan.stages[1].cost.send_us, 3 * message_us);  // side, a, and a's gradient
}

/// Random programs with writes, slices, skips and ties: the plan is always consistent.
TEST(Partition, RandomGraphsGiveConsistentPlans) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    GraphBuilder g;
    std::vector<ValueId> values{g.linear(g.input({8, 16}), "first", 16)};
    const ValueId tied = g.parameter("tied", {16, 16});
    for (int i = 0; i < 20; ++i) {
      const ValueId x = values[values.size() - 1 - random() % std::min<size_t>(4, values.size())];
      switch (random() % 6) {
        case 0:
          values.push_back(g.linear(x, std::string("m").append(std::to_string(i)), 16));
          break;
        case 1:
          values.push_back(g.linear_with(x, tied));
          break;
        case 2:
          values.push_back(g.in_place("aten::mul_", x));
          break;
        case 3:
          values.push_back(g.op("aten::add", {x, values[random() % values.size()]}, {8, 16}));
          break;
        case 4: {
          TensorSpec half = contiguous_spec({4, 16});
          half.storage_offset = 64;
          const ValueId slice = g.view("aten::slice", x, half);
          g.spec(slice).requires_grad = g.spec(x).requires_grad;
          values.push_back(g.op("aten::repeat", {slice}, {8, 16}));
          break;
        }
        default:
          values.push_back(g.relu(x));
      }
    }
    const Graph graph = g.build(g.sum(values.back()));
    for (int num_ranks : {1, 2, 3, 4}) {
      PartitionOptions options = on_ranks(num_ranks);
      options.request.exact_ties = seed % 2 == 0;
      const Plan plan = partition(graph, options);
      ASSERT_NO_THROW(check(graph, plan)) << "seed " << seed << ", ranks " << num_ranks;
      EXPECT_EQ(deserialise_plan(serialise(plan), graph), plan);
    }
  }
}

}  // namespace
}  // namespace smp::partitioner
