// How many microbatches one rank holds between their forward and their weight gradients. Internal to the schedule room.
#pragma once

#include <map>
#include <utility>

#include "partitioner/plan/action.h"
#include "partitioner/schedule/microbatch_graphs.h"

namespace smp::partitioner {

class InFlight {
 public:
  /// What a stage of `program` may not let grow beyond its limit: the microbatches that it holds,
  /// and those of other programs that any of their stages on this rank holds.
  int held(int program, int stage) const {
    const auto own = stages_.find({program, stage});
    int number = own == stages_.end() ? 0 : own->second;
    for (const auto& [other, microbatches] : microbatches_) {
      if (other != program) number += static_cast<int>(microbatches.size());
    }
    return number;
  }

  /// Counts what `computation` saves for a backward, or frees. True where that makes the rank hold more.
  bool count(const Action& computation, const MicrobatchGraphs& graphs) {
    const ActionRow& row = computation.row();
    const int change = (holds(row.makes, Item::kSaved) ? 1 : 0) - (row.frees == Item::kSaved ? 1 : 0);
    const int m = computation.microbatch, program = graphs.program_of(m);
    if (change == 0 || !graphs.has_backward(computation.stage, m)) return false;
    stages_[{program, computation.stage}] += change;
    std::map<int, int>& held = microbatches_[program];
    held[m] += change;
    if (held[m] == 0) held.erase(m);
    return change > 0;
  }

 private:
  std::map<std::pair<int, int>, int> stages_;       // by program and stage: microbatches
  std::map<int, std::map<int, int>> microbatches_;  // by program and microbatch: stages
};

}  // namespace smp::partitioner
