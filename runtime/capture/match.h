// How far a run of a body equals a recording, and what differs. Plain data, and how it becomes a match of another recording.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/capture/recording.h"

namespace smp::runtime {

struct Match {
  std::shared_ptr<Recording> recording{};
  partitioner::NodeId position = 0;      // how many of its operators have matched, those that nobody calls included
  CapturedBody run{};                    // what differs from the recording so far
  std::vector<ConstantTensor> used{};    // constants of this run, as they were at their first use
  std::vector<c10::Storage> storages{};  // for its ghosts, as Recording::storages

  /// Goes past operators that nobody calls.
  void skip_synthesised() {
    const auto& calls = recording->calls;
    while (static_cast<size_t>(position) < calls.size() && calls[static_cast<size_t>(position)].synthesised) ++position;
  }
  /// For texts: that of the last operator.
  const std::string& module() const;
  /// The run, at its end. Throws when a constant was rewritten after its first use.
  CapturedBody finish() const;
  /// The same run as one of `candidate`, if it may be one, its first `num_roots` backwards included.
  std::optional<Match> of(const std::shared_ptr<Recording>& candidate, size_t num_roots) const;
};

}  // namespace smp::runtime
