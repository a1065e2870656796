// Cuts inside a stage, around operators that cannot be taped and around regions that are recomputed.
#pragma once

#include <optional>

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Cuts `stage` so that its operators that no tape holds (untaped.h), with what must share a stage with them (node_groups),
/// lie in segments of their own. Runs of fewer than eight operators between them are not worth a tape, and go with them.
/// Each recompute region of a graph with backwards is a segment of its own, or several; one from which such a group reaches
/// out is kept. Nothing when one segment is left that is not recomputed. `has_tapes`: else all stay on autograd.
std::optional<Segments> cut_into_segments(const Graph& graph, const Plan& plan, int stage, bool has_tapes = true);

}  // namespace smp::partitioner
