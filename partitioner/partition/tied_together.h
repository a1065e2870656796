// Tied weights on one rank: its second visit ends the pipeline.
#pragma once

#include <optional>

#include "partitioner/partition/chain_of_graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// The plan that splits the operators like `apart`, a plan with one stage per rank, but keeps every parameter whole that
/// `apart` gives to several ranks: what reads one of them again, and all that follows, becomes a second visit of the first
/// rank. Such a parameter exists once, and its gradient is summed as on one process, to the bit. Nothing when `apart`
/// shares no parameter, when no cut lies between the readers, or when a rank would be over its memory limit.
std::optional<Plan> with_ties_together(const PlanInput& input, const Plan& apart);

}  // namespace smp::partitioner
