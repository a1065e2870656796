// Predicts how a schedule runs: times and bubble, by performing exactly its table.
#pragma once

#include <array>
#include <numeric>
#include <vector>

#include "partitioner/schedule/schedule.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

/// Times of one stage for one microbatch, in microseconds: of a forward, a backward until the gradients that leave the stage
/// are there, and what is behind it.
struct StageTime {
  std::array<double, kNumComputations> us{1, 1};
  double& of(ActionKind computation) { return us.at(static_cast<size_t>(computation)); }
  double of(ActionKind computation) const { return us.at(static_cast<size_t>(computation)); }
  double total_us() const { return std::accumulate(us.begin(), us.end(), 0.0); }
  bool operator==(const StageTime&) const = default;
};
static_assert(kNumComputations == 3, "predict_step.cpp and shift_cuts.cpp give each computation its time");

/// Time to move one microbatch over one edge; its direction tells activations (source < target) from gradients.
struct EdgeTime {
  Edge edge;
  double us = 0;
};

struct SimulationInput {
  std::vector<StageTime> times;  // by stage
  /// By stage and microbatch, in place of `times`: what a real step has taken. Empty: every microbatch takes the same.
  std::vector<std::vector<StageTime>> microbatch_times{};
  std::vector<EdgeTime> transfers;  // an edge that is not listed takes no time
  /// false: transfers run beside computation. true: both ranks are busy for as long as the transfer
  /// takes, as CPU ranks that drive MPI inline; what of it happens at the same time, does.
  bool transfers_occupy_ranks = false;
};

struct ActionTime {
  double start_us = 0;  // a receive starts when its rank reaches it and ends when its message is there
  double end_us = 0;
  bool operator==(const ActionTime&) const = default;
};

struct Simulation {
  std::vector<std::vector<ActionTime>> times;  // as Schedule::columns
  double makespan_us = 0;
  double bubble = 0;  // fraction of the makespan in which a rank does not compute, mean over ranks
};

/// Performs `schedule` rank by rank in column order. Messages of one edge follow one another; sends are buffered.
///
/// Throws c10::ValueError where the input has the wrong sizes, or where the schedule deadlocks.
Simulation simulate(const Schedule& schedule, const SimulationInput& input);

}  // namespace smp::partitioner
