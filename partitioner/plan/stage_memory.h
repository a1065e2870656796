// What one microbatch takes of a stage's memory while its operators run, beside what it leaves.
#pragma once

#include <cstdint>

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Bytes of one microbatch on one stage; parameters, their accumulated gradients and optimizer
/// state are not in it.
struct StageMemory {
  int64_t saved = 0;    // between its forward and its backward
  int64_t forward = 0;  // at most during its forward, what it saves included
  /// At most during its backward, the still saved included. The first backward of a step makes the
  /// gradients of the parameters, which stay and count here; a later one makes them for a moment
  /// and adds them.
  int64_t first_backward = 0;
  int64_t later_backward = 0;
  bool operator==(const StageMemory&) const = default;
};

/// Walks the operators of `plan.stages[stage]` forwards, then backwards, and allocates and frees as
/// the replay and LibTorch's autograd engine do: a tensor lives until its last reader has run or,
/// if it is saved, until the backward of the last operator that saved it; a gradient until its
/// operator's backward has run. Received tensors count, sent ones until they are packed.
///
/// Expects the activations and gradients of `plan` to be filled in.
StageMemory stage_memory(const Graph& graph, const Plan& plan, int stage);

}  // namespace smp::partitioner
