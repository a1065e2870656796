// Stage graphs for the tests of schedules.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner::testing {

/// One stage per rank, each fed by the one before; the first reads the step's input, the last its target.
inline StageGraph chain(int num_stages, bool has_backward = true) {
  StageGraph graph;
  graph.num_ranks = num_stages;
  graph.stage_has_backward.assign(num_stages, has_backward);
  graph.activations.push_back({kInputStage, 0});
  if (num_stages > 1) graph.activations.push_back({kInputStage, num_stages - 1});
  for (int stage = 0; stage < num_stages; ++stage) {
    graph.rank_of_stage.push_back(stage);
    if (stage == 0) continue;
    graph.activations.push_back({stage - 1, stage});
    if (has_backward) graph.gradients.push_back({stage, stage - 1});
  }
  return graph;
}

/// By stage: the microbatches that it holds at most between a forward and the weight gradients.
inline std::vector<int> peak_in_flight(const Schedule& schedule) {
  const auto num_stages = static_cast<int>(schedule.in_flight_limits.size());
  std::vector<char> is_trained(static_cast<size_t>(num_stages * schedule.num_microbatches), 0);
  std::vector<int> now(schedule.in_flight_limits.size(), 0), peak = now;
  const auto mark_of = [&](const Action& action) -> char& {
    return is_trained[static_cast<size_t>(action.microbatch * num_stages + action.stage)];
  };
  for (const auto& column : schedule.columns) {
    for (const Action& action : column) {
      if (action.kind == ActionKind::kWeightGradient) mark_of(action) = 1;
    }
    for (const Action& action : column) {
      if (!action.is_compute() || !mark_of(action)) continue;
      int &held = now[action.stage], &most = peak[action.stage];
      held += (action.kind == ActionKind::kForward) - (action.kind == ActionKind::kWeightGradient);
      most = std::max(most, held);
    }
  }
  return peak;
}

class RandomGraphs {
 public:
  explicit RandomGraphs(uint64_t seed) : generator_(seed) {}

  int number(int low, int high) {  // both included
    return std::uniform_int_distribution<int>(low, high)(generator_);
  }
  bool happens(double probability) { return std::bernoulli_distribution(probability)(generator_); }

  std::vector<int> placement(int num_ranks, int num_stages) {
    std::vector<int> rank_of_stage;
    for (int stage = 0; stage < num_stages; ++stage) {
      rank_of_stage.push_back(number(0, num_ranks - 1));
    }
    return rank_of_stage;
  }

  /// Any acyclic graph: skips, branches, several stages per rank, ranks without a stage, relays, stages without a backward.
  StageGraph stage_graph(int num_ranks, std::vector<int> rank_of_stage) {
    StageGraph graph;
    graph.num_ranks = num_ranks;
    graph.rank_of_stage = std::move(rank_of_stage);
    const bool has_backward = happens(0.8);
    const double density = number(1, 8) / 10.0;
    for (int stage = 0; stage < graph.num_stages(); ++stage) {
      graph.stage_has_backward.push_back(has_backward && happens(0.9));
      for (int source = kInputStage; source < stage; ++source) {
        if (happens(density)) graph.activations.push_back({source, stage});
        if (source == kInputStage || !happens(density)) continue;
        if (!graph.stage_has_backward[stage] || !graph.stage_has_backward[source]) continue;
        graph.gradients.push_back({stage, source});
      }
    }
    std::sort(graph.activations.begin(), graph.activations.end());
    std::sort(graph.gradients.begin(), graph.gradients.end());
    return graph;
  }

 private:
  std::mt19937_64 generator_;
};

}  // namespace smp::partitioner::testing
