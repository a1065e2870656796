// What crosses between the stages of a plan.
#pragma once

#include <vector>

#include "partitioner/graph/gradient_flow.h"
#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Every value that a stage reads and another one produces, once per reading stage, ordered by
/// (value, target); step inputs come from kInputStage, for stages on rank 0 as well.
std::vector<Transfer> activation_transfers(const Graph& graph, const std::vector<int>& stage_of_node);

/// The relays: for each value that receives a gradient, from the last stage whose use of it leads to the root to the one
/// before it, and so on down to the producer; for each parameter, the same among the stages of one rank, or of all where
/// `plan` has exact ties, down to the first that uses it in any backward. Ordered by (backward, value, descending source).
/// Step inputs get none: they are copies that the user never sees. Expects the stages of `plan`, with their ranks.
std::vector<Transfer> gradient_relays(const Graph& graph, const Plan& plan);

}  // namespace smp::partitioner
