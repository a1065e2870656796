// Layouts and numbers of microbatches, chosen by prediction: where one must win, it does.
#include "partitioner/partition/choose_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "partitioner/partition/predict_step.h"
#include "tests/support/graph_builder.h"
#include "tests/support/plan_cases.h"

namespace smp::partitioner {
namespace {

using smp::testing::GraphBuilder;
using smp::testing::refusal_of;

/// Four linears and relus on `rows` rows.
Graph perceptron(int64_t rows, int64_t width) {
  GraphBuilder g;
  ValueId x = g.input({rows, width});
  for (int i = 0; i < 4; ++i) x = g.relu(g.linear(x, "layers." + std::to_string(i), width));
  return g.build(g.sum(x));
}

struct Candidates {
  std::deque<Graph> graphs;  // stay where they are
  std::vector<LayoutCandidate> all;

  void add(int ranks, int replicas, int microbatches, int64_t rows, int64_t width) {
    graphs.push_back(perceptron(rows / microbatches, width));
    all.push_back({ranks, replicas, microbatches, rows, &graphs.back()});
  }
};

TEST(ChooseLayout, MorePartsFillThePipelineUntilTheirOverheadCostsMore) {
  Candidates large, small;
  for (int count : microbatch_counts(4096, 64)) {
    large.add(4, 1, count, 4096, 256);
    small.add(4, 1, count, 4096, 1);
  }
  const LayoutChoice of_large = choose_layout(large.all, {});
  EXPECT_GE(large.all[of_large.best].microbatches, 16);
  const LayoutChoice of_small = choose_layout(small.all, {});
  EXPECT_LT(small.all[of_small.best].microbatches, large.all[of_large.best].microbatches);
  EXPECT_GT(of_small.predictions.back().plan->predicted_step_us,
            of_small.predictions[of_small.best].plan->predicted_step_us);
}

TEST(ChooseLayout, EvaluationHasNoGradientsToAverage) {
  GraphBuilder g;
  g.relu(g.linear(g.input({64, 64}), "fc", 64));
  const Graph graph = g.build();
  const LayoutChoice choice = choose_layout({{1, 2, 1, 64, &graph}}, {});
  EXPECT_DOUBLE_EQ(choice.predictions[0].us_per_row * 64 * 2, partition(graph, {}).predicted_step_us);
}

TEST(ChooseLayout, ReplicasWinWhereGradientsAreSmallAndPipelinesWhereTheyAreLarge) {
  Candidates many_rows, few_rows;
  for (const auto& [ranks, replicas] : layouts_of(4)) {
    many_rows.add(ranks, replicas, ranks == 1 ? 1 : 8, 4096, 64);
    few_rows.add(ranks, replicas, ranks == 1 ? 1 : 4, 32, 2048);
  }
  PartitionOptions options;
  options.machine.device.link_gigabytes_per_s = 0.5;
  const LayoutChoice rows = choose_layout(many_rows.all, options);
  EXPECT_EQ(many_rows.all[rows.best].replicas, 4);
  const LayoutChoice weights = choose_layout(few_rows.all, options);
  EXPECT_EQ(few_rows.all[weights.best].pipeline_ranks, 4);
}

TEST(ChooseLayout, MemoryLimitLeavesPipelinesOnly) {
  Candidates candidates;
  for (const auto& [ranks, replicas] : layouts_of(4)) {
    candidates.add(ranks, replicas, ranks == 1 ? 1 : 8, 512, 256);
  }
  PartitionOptions options;
  const LayoutChoice free = choose_layout(candidates.all, options);
  EXPECT_EQ(candidates.all[free.best].replicas, 4);
  const auto& whole = free.predictions.back().plan->predicted_peak_bytes;
  const auto& parts = free.predictions.front().plan->predicted_peak_bytes;
  options.request.memory_limit_bytes = (whole[0] + *std::max_element(parts.begin(), parts.end())) / 2;
  const LayoutChoice limited = choose_layout(candidates.all, options);
  EXPECT_GT(candidates.all[limited.best].pipeline_ranks, 1);
  EXPECT_NE(limited.predictions.back().refusal.find("memory limit"), std::string::npos);
  options.request.memory_limit_bytes = 1000;
  EXPECT_NE(refusal_of([&] { choose_layout(candidates.all, options); }).find("memory limit"), std::string::npos);
}

TEST(ChooseLayout, ListsWhatThereIsToChooseFrom) {
  using Pairs = std::vector<std::pair<int, int>>;
  EXPECT_EQ(layouts_of(6), (Pairs{{6, 1}, {3, 2}, {2, 3}, {1, 6}}));
  EXPECT_EQ(microbatch_counts(12, 6), (std::vector<int>{1, 2, 3, 4, 6}));
  EXPECT_EQ(microbatch_counts(2, 64), (std::vector<int>{1, 2}));
  const DeviceModel device;
  EXPECT_EQ(averaging_us(device, 1 << 20, 1, 0), 0);
  EXPECT_DOUBLE_EQ(averaging_us(device, 1 << 20, 2, 0), 2 * device.message_us(1 << 19));
  EXPECT_DOUBLE_EQ(averaging_us(device, 1 << 20, 2, 1 << 18), 8 * device.message_us(1 << 17));
}

TEST(ChooseLayout, CountsWithTheMeasuredAveraging) {
  MeasuredCosts costs;
  Plan plan;
  plan.stages = {{.rank = 0, .nodes = {}, .parameters = {}, .modules = {}, .cost = {}}};
  plan.stages[0].cost.gradient_bytes = 3 << 20;
  Machine machine;
  RuntimeBehaviour behaviour;
  machine.measured = &costs;
  const auto among = [&](int replicas) { return averaging_us(plan, replicas, machine, behaviour); };
  EXPECT_DOUBLE_EQ(among(2), averaging_us(machine.device, 3 << 20, 2, 0));
  costs.set_averaging_us_per_mib(100);
  EXPECT_DOUBLE_EQ(among(2), 300);
  EXPECT_DOUBLE_EQ(among(4), 450);  // 2 (R - 1) / R of them come and go
  behaviour.gradients_share_memory = true;
  EXPECT_DOUBLE_EQ(among(4), 300);
  EXPECT_EQ(among(1), 0);
}

TEST(ChooseLayout, RefusesNothingToChooseFromAndImpossibleCandidates) {
  EXPECT_NE(refusal_of([] { choose_layout({}, {}); }).find("expected a candidate"), std::string::npos);
  Candidates candidates;
  candidates.add(1, 1, 1, 8, 8);
  candidates.all[0].microbatches = 9;
  EXPECT_NE(refusal_of([&] { choose_layout(candidates.all, {}); }).find("a row for each microbatch"), std::string::npos);
}

}  // namespace
}  // namespace smp::partitioner
