// The planner's choice of what runs again, against all choices that there are.
#include "partitioner/partition/choose_recomputation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <random>

#include "partitioner/partition/build_plan.h"
#include "partitioner/partition/graph_costs.h"
#include "partitioner/partition/partition.h"
#include "partitioner/plan/check_plan.h"
#include "partitioner/plan/plan_io.h"
#include "tests/support/graph_builder.h"

namespace smp::partitioner {
namespace {

using smp::testing::GraphBuilder;

/// Layers of different widths, with activations that cost little, and some that are read again later.
Graph random_net(uint64_t seed, int num_layers) {
  std::mt19937_64 random(seed);
  const auto any = [&](int least, int most) {
    return least + static_cast<int>(random() % static_cast<uint64_t>(most - least + 1));
  };
  constexpr int64_t kRows = 64;
  GraphBuilder g;
  int64_t width = 32;
  ValueId x = g.input({kRows, width}), kept = kNoValue;
  for (int i = 0; i < num_layers; ++i) {
    const int64_t next = int64_t{16} << any(0, 3);
    x = g.linear(x, "layer" + std::to_string(i), next);
    width = next;
    for (int k = any(0, 2); k > 0; --k) x = g.op(any(0, 1) ? "aten::gelu" : "aten::tanh", {x}, {kRows, width});
    if (any(0, 3) == 0) kept = x;
    if (kept != kNoValue && kept != x && g.spec(kept).sizes == g.spec(x).sizes)
      x = g.op("aten::mul", {x, kept}, {kRows, width});
  }
  return g.build(g.sum(x));
}

PartitionOptions options_of(int num_ranks, int64_t limit) {
  PartitionOptions options;
  options.request.num_ranks = num_ranks;
  options.request.num_microbatches = 2 * num_ranks;
  options.request.memory_limit_bytes = limit;
  options.request.chooses_recomputation = true;
  options.behaviour.weight_gradients_wait = true;
  return options;
}

int64_t peak(const Plan& plan) {
  return *std::max_element(plan.predicted_peak_bytes.begin(), plan.predicted_peak_bytes.end());
}

/// Of all that `chosen`'s pieces can keep.
double best_step_us(const Graph& graph, const PartitionOptions& options, const Plan& chosen) {
  const GraphCosts costs = graph_costs(graph, options.machine.device);
  std::vector<NodeId> candidates;
  for (NodeId n = 0; n < static_cast<NodeId>(graph.nodes.size()); ++n) {
    if (chosen.recomputation.region_of(n) != kNoRegion) candidates.push_back(n);
  }
  double best = -1;
  for (uint32_t keeps = 0; keeps < (uint32_t{1} << candidates.size()); ++keeps) {
    Recomputation recomputation = chosen.recomputation;
    for (size_t i = 0; i < candidates.size(); ++i)
      recomputation.is_kept[static_cast<size_t>(candidates[i])] = (keeps >> i) & 1;
    const GraphCosts with = with_recomputation(graph, costs, recomputation);
    const Plan plan = build_plan({graph, with, options.request, options.machine, options.behaviour, recomputation},
                                 {chosen.stage_of_node, {0}});
    if (peak(plan) > options.request.memory_limit_bytes) continue;
    if (best < 0 || plan.predicted_step_us < best) best = plan.predicted_step_us;
  }
  return best;
}

TEST(ChosenRecomputation, IsNearTheBestOfAllChoices) {
  double worst = 1, sum = 0;
  int count = 0;
  for (uint64_t seed = 0; count < 40; ++seed) {
    const Graph graph = random_net(seed, 5);
    if (graph.nodes.size() > 13) continue;  // all choices of more take too long here
    const int64_t most = peak(partition(graph, options_of(1, -1)));
    for (const double part : {0.9, 0.75}) {
      const PartitionOptions options = options_of(1, static_cast<int64_t>(static_cast<double>(most) * part));
      Plan plan;
      try {
        plan = partition(graph, options);
      } catch (const c10::ValueError&) {
        continue;  // parameters and gradients alone
      }
      ASSERT_LE(peak(plan), options.request.memory_limit_bytes) << "seed " << seed;
      const double gap = plan.predicted_step_us / best_step_us(graph, options, plan);
      worst = std::max(worst, gap);
      sum += gap;
      ++count;
    }
  }
  std::cout << "step over the best: worst " << worst << ", mean " << sum / count << " of " << count << '\n';
  EXPECT_LE(worst, 1.02);
}

TEST(ChosenRecomputation, IsNoneWhereTheFastestPlanFits) {
  const Graph graph = random_net(1, 8);
  const Plan free = partition(graph, options_of(2, -1)), limited = partition(graph, options_of(2, peak(free)));
  EXPECT_EQ(limited, free);
  EXPECT_TRUE(limited.recomputation.is_empty());
}

TEST(ChosenRecomputation, FallsWithTheLimitAndNeverMakesStepsFaster) {
  for (const int ranks : {1, 2, 3}) {
    const Graph graph = random_net(7, 24);
    Plan before = partition(graph, options_of(ranks, -1));
    const int64_t most = peak(before);
    for (int percent = 95; percent >= 40; percent -= 5) {
      std::optional<Plan> plan;
      try {
        plan = partition(graph, options_of(ranks, most * percent / 100));
      } catch (const c10::ValueError& error) {
        EXPECT_NE(std::string(error.what()).find("expected a memory limit of at least"), std::string::npos);
        break;
      }
      EXPECT_LE(peak(*plan), most * percent / 100);
      EXPECT_GE(plan->predicted_step_us, before.predicted_step_us * (1 - 1e-9)) << ranks << " ranks at " << percent;
      check(graph, *plan);
      EXPECT_EQ(deserialise_plan(serialise(*plan), graph), *plan);
      before = std::move(*plan);
    }
    EXPECT_FALSE(before.recomputation.is_empty()) << ranks;
  }
}

TEST(ChosenRecomputation, OfPlansOfOthersIsChecked) {
  GraphBuilder g;
  const ValueId x = g.linear(g.input({8, 8}), "fc", 8);
  g.in_place("relu_", x);
  const Graph graph = g.build(g.sum(x));
  Plan plan = partition(graph, options_of(1, -1));
  plan.recomputation = {.region = {0, kNoRegion, kNoRegion},
                        .is_kept = {false, false, false}};  // relu_ writes to what linear made
  EXPECT_THROW(deserialise_plan(serialise(plan), graph), c10::ValueError);
  plan.recomputation.region = {0};
  EXPECT_THROW(deserialise_plan(serialise(plan), graph), c10::ValueError);
}

}  // namespace
}  // namespace smp::partitioner
