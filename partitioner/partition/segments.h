// Cuts inside a stage, around operators that cannot be taped.
#pragma once

#include <optional>

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Cuts `stage` so that its operators that no tape holds (untaped.h), with what must share a stage with them (node_groups),
/// lie in segments of their own. Runs of fewer than eight operators between them are not worth a tape, and go with them.
/// Nothing when no segment is left for a tape, or when all may be taped.
std::optional<Segments> cut_into_segments(const Graph& graph, const Plan& plan, int stage);

}  // namespace smp::partitioner
