// Whether a plan and a graph fit together: what every consumer of a plan relies on.
#pragma once

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Throws c10::ValueError with the first contradiction in where `plan`, complete by derive(), has its operators: each reads
/// what is made on its stage or before, terms of a gradient add up in one order, and operators that share written storages
/// are on one stage.
void check(const Graph& graph, const Plan& plan);

}  // namespace smp::partitioner
