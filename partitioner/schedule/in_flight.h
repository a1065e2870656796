// How many microbatches one rank holds between their forward and their weight gradients. Internal to the schedule room.
#pragma once

#include <map>
#include <utility>

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

  void add(int program, int stage, int microbatch) {
    ++stages_[{program, stage}];
    ++microbatches_[program][microbatch];
  }

  void remove(int program, int stage, int microbatch) {
    --stages_[{program, stage}];
    std::map<int, int>& held = microbatches_[program];
    if (--held[microbatch] == 0) held.erase(microbatch);
  }

 private:
  std::map<std::pair<int, int>, int> stages_;       // by program and stage: microbatches
  std::map<int, std::map<int, int>> microbatches_;  // by program and microbatch: stages
};

}  // namespace smp::partitioner
