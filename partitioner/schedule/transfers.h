// Puts sends and receives around computations. Internal to the schedule room.
#pragma once

#include <span>
#include <vector>

#include "partitioner/plan/action.h"
#include "partitioner/schedule/microbatch_graphs.h"

namespace smp::partitioner {

/// Columns by rank, out of the computations of all ranks in one order that respects the dependencies.
///
/// A receive stands directly before the computation that reads it, a send directly after the one that made it. Step inputs
/// of microbatch m leave with the leader's own first forward of m, or before if the consumer comes earlier. No deadlock with
/// buffered sends: performing the expanded actions in the given order is possible.
std::vector<std::vector<Action>> insert_transfers(std::span<const Action> computations, const MicrobatchGraphs& graphs);

}  // namespace smp::partitioner
