// Proves a schedule sound before anything runs.
#pragma once

#include <span>

#include "partitioner/schedule/schedule.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

/// Throws c10::ValueError, naming rank, position and action, unless
/// - every forward and backward stands exactly once, on its own rank, in microbatch order per
/// stage, and per rank between microbatches of different programs (pointers);
/// - every transfer that the stage graphs demand is sent once and received once, and no other;
/// - both ends of a channel (source stage and rank, target stage and rank, direction) see the
/// microbatches in one order;
/// - each action comes after what it needs, with no deadlock when sends are buffered;
/// - no stage ever holds more microbatches than `schedule.in_flight_limits` says, those of other
/// programs on its rank included.
void check(const Schedule& schedule, std::span<const StageGraph* const> graph_of_microbatch);

/// The same graph for all microbatches.
void check(const Schedule& schedule, const StageGraph& graph);

}  // namespace smp::partitioner
