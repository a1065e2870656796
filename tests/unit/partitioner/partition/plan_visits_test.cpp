// Plans that visit each rank several times: asked for, and chosen.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "partitioner/partition/partition.h"
#include "partitioner/plan/check_plan.h"
#include "tests/support/graph_builder.h"

namespace smp::partitioner {
namespace {

Graph graph_of_layers(int num_layers) {
  testing::GraphBuilder builder;
  auto x = builder.input({16, 64});
  for (int i = 0; i < num_layers; ++i) {
    x = builder.relu(builder.linear(x, "layers." + std::to_string(i), 64));
  }
  return builder.build(builder.sum(x));
}

TEST(VirtualStages, LieOnTheRanksRoundAfterRound) {
  const Graph graph = graph_of_layers(24);
  PartitionOptions options;
  options.request.num_ranks = 4;
  options.request.num_microbatches = 8;
  options.machine.device.link_latency_us = 0;
  const Plan once = partition(graph, options);
  options.request.schedule.virtual_stages = 2;
  const Plan twice = partition(graph, options);
  check(graph, twice);
  ASSERT_EQ(twice.stages.size(), 8);
  for (int s = 0; s < 8; ++s) EXPECT_EQ(twice.stages[static_cast<size_t>(s)].rank, s % 4);
  EXPECT_LT(twice.predicted_bubble, once.predicted_bubble);
  options.request.memory_limit_bytes =
      *std::max_element(twice.predicted_peak_bytes.begin(), twice.predicted_peak_bytes.end());
  const Plan limited = partition(graph, options);
  for (int64_t bytes : limited.predicted_peak_bytes) EXPECT_LE(bytes, options.request.memory_limit_bytes);
}

TEST(VirtualStages, AreRefusedBesidePlacementByHand) {
  const Graph graph = graph_of_layers(4);
  PartitionOptions options;
  options.request.num_ranks = 2;
  options.request.schedule.virtual_stages = 2;
  options.placement.pins["layers.0"] = 1;
  EXPECT_THROW(partition(graph, options), c10::ValueError);
  options.placement.pins.clear();
  options.placement.auto_partition = false;
  EXPECT_THROW(partition(graph, options), c10::ValueError);
  options.placement.auto_partition = true;
  options.request.schedule.virtual_stages = -1;
  EXPECT_THROW(partition(graph, options), c10::ValueError);
}

PartitionOptions chosen_visits(int num_ranks, int num_microbatches) {
  PartitionOptions options;
  options.request.num_ranks = num_ranks;
  options.request.num_microbatches = num_microbatches;
  options.request.chooses_visits = true;
  return options;
}

TEST(VirtualStages, AreChosenWhereTheyMakeTheStepShorter) {
  const Graph graph = graph_of_layers(24);
  PartitionOptions options = chosen_visits(4, 4), once = options;
  options.machine.device.link_latency_us = once.machine.device.link_latency_us = 0;
  once.request.chooses_visits = false;
  const Plan plan = partition(graph, options);
  check(graph, plan);
  ASSERT_GE(plan.stages.size(), 8);
  for (size_t s = 0; s < plan.stages.size(); ++s) EXPECT_EQ(plan.stages[s].rank, static_cast<int>(s % 4));
  EXPECT_LT(plan.predicted_step_us, 0.96 * partition(graph, once).predicted_step_us);
  options.request.chooses_visits = false;
  options.request.schedule.virtual_stages = static_cast<int>(plan.stages.size()) / 4;
  EXPECT_EQ(partition(graph, options), plan);
}

TEST(VirtualStages, AreNotChosenWhereMessagesCostMore) {
  const Graph graph = graph_of_layers(24);
  PartitionOptions options = chosen_visits(4, 4);
  options.machine.device.link_latency_us = 10'000;
  EXPECT_EQ(partition(graph, options).stages.size(), 4);
}

TEST(VirtualStages, AreNotChosenWhereMemoryIsShort) {
  const Graph graph = graph_of_layers(24);
  PartitionOptions options = chosen_visits(4, 4);
  options.machine.device.link_latency_us = 0;
  const auto most_bytes = [](const Plan& plan) {
    return *std::max_element(plan.predicted_peak_bytes.begin(), plan.predicted_peak_bytes.end());
  };
  const int64_t chosen = most_bytes(partition(graph, options));
  PartitionOptions once = options;
  once.request.chooses_visits = false;
  options.request.memory_limit_bytes = most_bytes(partition(graph, once));
  ASSERT_LT(options.request.memory_limit_bytes, chosen);
  const Plan plan = partition(graph, options);
  EXPECT_EQ(plan.stages.size(), 4);
  EXPECT_LE(most_bytes(plan), options.request.memory_limit_bytes);
}

TEST(VirtualStages, AreNotChosenBesidePlacementByHandNorWhereNoScheduleTakesThem) {
  const Graph graph = graph_of_layers(24);
  const auto num_stages = [&](PartitionOptions options) {
    options.machine.device.link_latency_us = 0;
    return partition(graph, options).stages.size();
  };
  PartitionOptions pinned = chosen_visits(4, 4), simple = pinned, limited = pinned, odd = chosen_visits(4, 5);
  pinned.placement.pins["layers.0"] = 0;
  simple.request.schedule.kind = ScheduleKind::kSimple;
  limited.request.schedule.active_microbatches = 4;
  for (const PartitionOptions& options : {pinned, simple, limited, odd, chosen_visits(1, 4)}) {
    EXPECT_EQ(num_stages(options), options.request.num_ranks);
  }
}

}  // namespace
}  // namespace smp::partitioner
