// What one microbatch takes of a stage's memory while its operators run, beside what it leaves.
#pragma once

#include <cstdint>
#include <set>

#include "partitioner/graph/gradient_flow.h"
#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

struct Remade;  // stage_uses.h

/// Bytes of one microbatch on one stage; parameters, their accumulated gradients, optimizer state
/// and message buffers are not in it.
struct StageMemory {
  int64_t saved = 0;    // between its forward and its backward, results not included
  int64_t results = 0;  // storages of returned tensors that are made here: until the step ends
  int64_t forward = 0;  // at most during its forward, what it leaves included
  /// At most during its backward, the still saved included. The first backward of a step makes the gradients of the
  /// parameters, which stay and count here; a later one makes them for a moment and adds them.
  int64_t first_backward = 0;
  int64_t later_backward = 0;
  /// The same for the last backward of a step, during which full buckets of gradients leave for the
  /// replicas; what the last of them takes until it is back, and beside that then.
  int64_t only_backward = 0;  // first and last
  int64_t last_backward = 0;
  int64_t under_way = 0;
  int64_t arriving = 0;
  /// Values from elsewhere whose memory lives on after the forward: until the backward, or until
  /// the step ends because a returned tensor lies on it.
  std::set<ValueId> saved_arrivals{};
  std::set<ValueId> returned_arrivals{};
  /// Of tensors from elsewhere and of the rank's own ones that operators here write to.
  int64_t written = 0;
  /// Of what leaves the stage after its forward.
  int64_t outputs = 0;
  bool operator==(const StageMemory&) const = default;
};

/// Walks the operators of `plan.stages[stage]` forwards, then backwards, and allocates and frees as the replay and
/// LibTorch's autograd engine do: a tensor lives until its last reader has run or, if it is saved, until the backward of the
/// last operator that saved it; a gradient until its operator's backward has run. Tensors from elsewhere, and gradients that
/// come from there, lie in memory of the rank: rank_memory.h. Sent ones count until they are packed.
///
/// Expects the activations and gradients of `plan` to be filled in. `flow`: of all backwards of the graph; what no
/// backward passes through is not saved. `bucket_bytes`: of gradients
/// that are averaged over replicas at once; 0: there are no replicas. `allocation_bytes`: DeviceModel::allocation_bytes.
/// `remade`: of the plan, where many stages are asked for; null: found anew.
StageMemory stage_memory(const Graph& graph, const GradientFlow& flow, const Plan& plan, int stage, int64_t bucket_bytes = 0,
                         bool buckets_are_shared = false, int64_t allocation_bytes = 1, const Remade* remade = nullptr);

}  // namespace smp::partitioner
