// What one rank holds beside its parameters while it performs its column of a schedule: the
// executor's own order of events, performed on sizes.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "partitioner/graph/graph.h"
#include "partitioner/memory/stage_memory.h"
#include "partitioner/plan/plan.h"
#include "partitioner/schedule/schedule.h"

namespace smp::partitioner {

/// Message buffers by capacity in bytes.
using BufferCounts = std::map<int64_t, int64_t>;

struct RankMemory {
  int64_t peak = 0;       // at most in the forwards and backwards of a step; gradients included
  int64_t results = 0;    // returned tensors that this rank made, in the end
  int64_t gradients = 0;  // of parameters, in the end
  int64_t under_way = 0;  // of gradients between replicas, after the last backward
  int64_t arriving = 0;   // beside that, when they are back
  BufferCounts buffers;   // that it has in use at once, at most
  int64_t buffer_bytes() const;
};

/// Performs the column of `rank`. `stages`: stage_memory() of each stage of the rank, any value for
/// the others. Every microbatch runs `graph`.
///
/// A buffer is in use from the moment its receive is posted until the tensor in it dies, which is
/// exact. One that is sent is free when the message has left, which depends on the receiver: as
/// many count as the schedule's limit lets the receiver be behind, and all where it does not limit sends.
///
/// `repeats_a_microbatch`: in one step the last microbatch runs twice, from its inputs on, which stay
/// until then. (runtime/stage/tape_comparison.h)
RankMemory rank_memory(const Graph& graph, const Plan& plan, const Schedule& schedule, int rank,
                       const std::vector<StageMemory>& stages, bool repeats_a_microbatch);

/// The buffers of rank_memory(), for the runtime, which makes them before the first step.
BufferCounts message_buffers(const Graph& graph, const Plan& plan, const Schedule& schedule, int rank,
                             bool repeats_a_microbatch);

/// Capacity of the buffer that carries `value`, whatever strides its gradient has.
int64_t buffer_bytes(const Value& value);

}  // namespace smp::partitioner
