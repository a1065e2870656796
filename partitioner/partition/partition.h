// The entry to planning: which rank runs which operators of a captured step. Pure: no ranks, no communication.
#pragma once

#include "partitioner/graph/graph.h"
#include "partitioner/plan/options.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Assigns every node of `graph` to a stage and every stage to a rank.
///
/// Automatic partitioning gives stage s to rank s, or to rank s % num_ranks with several visits. It lays the operators out
/// in a few orders (linearise.h), splits each so that the slowest stage is as fast as possible (contiguous.h), and of the
/// splits that are nearly as good as the best takes the one whose simulated step is the shortest. With several visits the
/// cuts of each split go where that step is shorter still (shift_cuts.h), and of all the shortest is taken. Pins keep
/// program order. Pins that no such split meets, auto_partition = false, and existing homes give visits: the order is cut
/// where the rank changes, at the places with the least traffic.
///
/// With chooses_visits there are more visits than one where the planner is free to cut, the schedule
/// can take them round after round, and the step is predicted to be a hundredth shorter, or more.
///
/// Throws c10::ValueError for options out of range, a pin to an unknown module or rank, operators that must share a stage
/// but are pinned to several ranks, pins with virtual_stages > 1, and a memory limit that nothing meets.
Plan partition(const Graph& graph, const PartitionOptions& options);

}  // namespace smp::partitioner
