// Predicts how a schedule runs: times and bubble, by performing exactly its table.
#pragma once

#include <vector>

#include "partitioner/schedule/schedule.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

/// Time of one stage for one microbatch, in microseconds.
struct StageTime {
  double forward_us = 1;
  double backward_us = 1;  // until the gradients that leave the stage are there
  double weight_us = 0;    // gradients of parameters, behind it
  /// Of a computation.
  double& us_of(ActionKind kind) {
    if (kind == ActionKind::kForward) return forward_us;
    return kind == ActionKind::kBackward ? backward_us : weight_us;
  }
  double us_of(ActionKind kind) const { return StageTime(*this).us_of(kind); }
  double us() const { return forward_us + backward_us + weight_us; }
  bool operator==(const StageTime&) const = default;
};

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
  std::vector<double> bubble_of_rank;  // fraction of the makespan in which the rank does not compute
  double bubble = 0;                   // mean over ranks
  std::vector<int> peak_in_flight;     // by stage
};

/// Performs `schedule` rank by rank in column order. Messages of one edge follow one another; sends are buffered.
///
/// A forward keeps its activations until its stage's weight gradients of that microbatch; where the
/// table has no backward (evaluation), it keeps nothing.
///
/// Throws c10::ValueError where the input has the wrong sizes, or where the schedule deadlocks.
Simulation simulate(const Schedule& schedule, const SimulationInput& input);

}  // namespace smp::partitioner
