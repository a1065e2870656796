// What follows from which stage runs which operator: what a stage reads, and what crosses between stages.
#pragma once

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// The way out of a plan, or a table of one, that contradicts its graph, for the ends of error texts.
inline constexpr const char* kPlanAgain = " Plan this graph again with partition().";

/// Fills in nodes, parameters and modules of each stage, activations and gradients, out of stage_of_node, the ranks of the
/// stages and exact_ties. The only place that makes them: they do not travel with a plan.
///
/// activations: every value that a stage reads and another one produces, once per reading stage; step inputs come from
/// kInputStage, for stages on rank 0 as well.
///
/// gradients: for each value that receives a gradient, from the last stage whose use of it leads to the root to the one
/// before it, and so on down to the producer; for each parameter, the same among the stages of one rank, or of all with
/// exact ties, down to the first that uses it in any backward. Step inputs get none: they are copies that the user never
/// sees.
///
/// Throws c10::ValueError unless each operator has a stage, and each stage an operator and a rank.
void derive(const Graph& graph, Plan& plan);

}  // namespace smp::partitioner
