// Cuts for several visits: against the chain's split, and against every other split there is.
#include "partitioner/partition/shift_cuts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>

#include "partitioner/partition/contiguous.h"
#include "partitioner/plan/check_plan.h"
#include "tests/support/graph_builder.h"

namespace smp::partitioner {
namespace {

constexpr int kNumGraphs = 24;

/// Layers of different widths: hardly ever can they be cut into four parts of one length. The first are not trained.
Graph uneven_graph(int seed, int num_frozen) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  testing::GraphBuilder builder;
  int64_t width = 64;
  auto x = builder.input({256, width});
  for (int i = 0; i < 10; ++i) {
    const int64_t inputs = std::exchange(width, 32 * (1 + static_cast<int64_t>(random() % 8)));
    const auto weight = builder.parameter("layers." + std::to_string(i), {width, inputs});
    builder.spec(weight).requires_grad = i >= num_frozen;
    x = builder.linear_with(x, weight);
  }
  return builder.build(builder.sum(x));
}

PartitionOptions two_visits() {
  PartitionOptions options;
  options.request.num_ranks = 2;
  options.request.num_microbatches = 8;
  options.request.schedule.virtual_stages = 2;
  options.behaviour.weight_gradients_wait = options.behaviour.repeats_a_microbatch = true;
  return options;
}

/// A graph in program order.
struct Case {
  explicit Case(int seed, int num_frozen = 0) : graph(uneven_graph(seed, num_frozen)) {}

  PlanInput input() const { return {graph, costs, options.request, options.machine, options.behaviour}; }
  Plan with_cuts(const ChainSplit& split) const {
    return build_plan(input(), assign_stages(split, order.nodes, options.request.num_ranks));
  }
  Plan with_equal_stages() const { return with_cuts(split_chain(make_chain(input(), order))); }
  Plan shifted() const { return with_shifted_cuts(input(), order, with_equal_stages()); }
  double step_us(const Plan& plan) const { return plan.predicted_step_us; }

  double best_step_us() const {
    const int n = static_cast<int>(order.nodes.size());
    double best_us = step_us(with_equal_stages());
    for (int a = 1; a < n; ++a) {
      for (int b = a + 1; b < n; ++b) {
        for (int c = b + 1; c < n; ++c) {
          ChainSplit split;
          split.cuts = {0, a, b, c, n};
          split.num_used_stages = 4;
          best_us = std::min(best_us, step_us(with_cuts(split)));
        }
      }
    }
    return best_us;
  }

  Graph graph;
  PartitionOptions options = two_visits();
  GraphCosts costs = graph_costs(graph, options.machine.device);
  Linearisation order = program_order(graph);
};

int64_t most_bytes(const Plan& plan) {
  return *std::max_element(plan.predicted_peak_bytes.begin(), plan.predicted_peak_bytes.end());
}

TEST(ShiftedCuts, MakeNoStepLongerAndManyShorter) {
  int num_shorter = 0;
  for (int seed = 0; seed < kNumGraphs; ++seed) {
    const Case drawn(seed);
    const Plan shifted = drawn.shifted();
    check(drawn.graph, shifted);
    ASSERT_EQ(shifted.stages.size(), 4);
    const double before_us = drawn.step_us(drawn.with_equal_stages()), after_us = drawn.step_us(shifted);
    EXPECT_LE(after_us, before_us) << "graph " << seed;
    if (after_us < 0.99 * before_us) ++num_shorter;
    EXPECT_LE(partition(drawn.graph, drawn.options).predicted_step_us, after_us * 1.0000001) << "graph " << seed;
  }
  EXPECT_GE(num_shorter, kNumGraphs / 3);
}

void expect_near_the_best(int num_frozen) {
  int num_near = 0;
  for (int seed = 0; seed < kNumGraphs; ++seed) {
    const Case drawn(seed, num_frozen);
    const double us = drawn.step_us(drawn.shifted()), best_us = drawn.best_step_us();
    if (us <= 1.02 * best_us) ++num_near;
    EXPECT_LE(us, 1.1 * best_us) << "graph " << seed << ", " << num_frozen << " layers frozen";
  }
  EXPECT_GE(num_near, kNumGraphs * 3 / 4) << num_frozen << " layers frozen";
}

TEST(ShiftedCuts, AreMostlyNearTheBestThereAre) { expect_near_the_best(0); }

// A stage that is not trained has no backward, and which stages those are changes with the cuts.
TEST(ShiftedCuts, AreMostlyNearTheBestWhereTheFirstLayersAreFrozen) {
  for (const int num_frozen : {2, 4, 6, 8}) expect_near_the_best(num_frozen);
}

TEST(ShiftedCuts, AreNotTakenWhereMemoryIsShort) {
  int num_larger = 0;
  for (int seed = 0; seed < kNumGraphs; ++seed) {
    Case drawn(seed);
    const Plan before = drawn.with_equal_stages(), shifted = drawn.shifted();
    if (most_bytes(shifted) <= most_bytes(before)) continue;
    ++num_larger;
    drawn.options.request.memory_limit_bytes = most_bytes(before);
    EXPECT_EQ(drawn.shifted(), before) << "graph " << seed;
    EXPECT_LE(most_bytes(partition(drawn.graph, drawn.options)), most_bytes(before)) << "graph " << seed;
  }
  EXPECT_GE(num_larger, 2);
}

// Sums of what messages take are rounded; where all that crosses a cut has no bytes, nothing may be left of them.
TEST(ShiftedCuts, ValuesWithoutBytesTakeNoTimeWhereALinkHasNoLatency) {
  PartitionOptions options = two_visits();
  options.machine.device.link_latency_us = 0;
  for (int seed = 0; seed < kNumGraphs; ++seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    testing::GraphBuilder builder;
    const auto width = [&] { return 1 + static_cast<int64_t>(random() % 1000); };
    auto x = builder.input({7, width()});
    const auto add_wide = [&] {
      const int64_t wide = width();
      const auto y = builder.linear(x, "wide." + std::to_string(builder.num_nodes()), wide);
      x = builder.op("aten::add", {builder.relu(y), y}, {7, wide});
    };
    for (int i = 0; i < 4; ++i) add_wide();
    x = builder.op("aten::clone", {x}, {0, 8});
    for (int i = 0; i < 3; ++i) x = builder.linear(x, "empty." + std::to_string(i), 8);
    x = builder.op("aten::clone", {x}, {7, 8});
    for (int i = 0; i < 4; ++i) add_wide();
    const Graph graph = builder.build(builder.sum(x));
    for (const double us : cut_traffic_us(graph, options.machine.device, program_order(graph).nodes)) {
      EXPECT_TRUE(us == 0 || us > 1e-3) << "graph " << seed << ": " << us << " us";
    }
    EXPECT_GT(partition(graph, options).predicted_step_us, 0) << "graph " << seed;
  }
}

}  // namespace
}  // namespace smp::partitioner
