// The table that all ranks compute from the same inputs and that the executor performs as it stands.
#pragma once

#include <algorithm>
#include <vector>

#include "partitioner/plan/action.h"

namespace smp::partitioner {

/// One column of actions per pipeline rank, performed from first to last.
///
///   stage 0 | F0 F1 F2 B0 F3 B1 B2 B3
///   stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
///   stage 2 | F0 B0 F1 B1 F2 B2 F3 B3
struct Schedule {
  int num_ranks = 0;
  int num_microbatches = 0;
  std::vector<std::vector<Action>> columns;  // by pipeline rank
  std::vector<int> in_flight_limits;         // by stage: microbatches between their forward and their weight gradients

  /// A rank that sends waits while send_limit() earlier messages of that edge and direction are
  /// under way. false: it never waits, because such a table could wait for ever (walk.h).
  bool limits_sends = false;

  /// Microbatches of the edge of `send` that may be under way at once: one more than the stage that
  /// holds them between forward and weight gradients may hold, the one that has just left.
  int send_limit(const Action& send) const {
    // The stage that runs its backward when all that it sent has come back.
    const int holder = send.is_forward() ? std::max(send.stage, 0) : send.peer;
    return in_flight_limits[static_cast<size_t>(holder)] + 1;
  }
  bool operator==(const Schedule&) const = default;
};

}  // namespace smp::partitioner
