// Whether a plan and a graph fit together: what every consumer of a plan relies on.
#pragma once

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Throws c10::ValueError with the first contradiction: every node on exactly one stage, in program order, stages monotone
/// along the program, ranks in range, operators that share written storages on one stage, every value that a stage reads
/// present or transferred, every relay ending at the producer, no transfer too many.
void check(const Graph& graph, const Plan& plan);

}  // namespace smp::partitioner
