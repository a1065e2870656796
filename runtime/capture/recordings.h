// The recordings of one step function, by signature. Owns the rule of which are forgotten.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/capture/recording.h"

namespace smp::runtime {

class Recordings {
 public:
  using Bucket = std::vector<std::shared_ptr<Recording>>;  // found or switched to last comes first

  /// Keeps the `max_recordings` used last.
  explicit Recordings(int64_t max_recordings) : max_recordings_(static_cast<size_t>(max_recordings)) {}

  /// Those of a signature, of which there is at least one; null: it is new.
  const Bucket* find(const std::string& key) const;
  /// Returns the recording that stands for it: an equal one, where there is one.
  std::shared_ptr<Recording> add(std::shared_ptr<Recording> recording);
  /// A run begins with it from now on.
  void move_to_front(const std::shared_ptr<Recording>& recording);
  void note_use(Recording& recording) { recording.last_use = ++num_runs_; }

 private:
  void forget_least_used();

  std::unordered_map<std::string, Bucket> by_key_;
  size_t max_recordings_;
  uint64_t num_runs_ = 0;
};

}  // namespace smp::runtime
