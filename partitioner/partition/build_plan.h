// Fills a Plan from the decision "which stage runs which node": what crosses, what it costs, what it holds, and the
// predicted step.
#pragma once

#include <vector>

#include "partitioner/partition/graph_costs.h"
#include "partitioner/plan/options.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

struct StageAssignment {
  std::vector<int> stage_of_node;  // never falls along the program
  std::vector<int> rank_of_stage;
};

/// All of a plan, of one pipeline: the averaging over replicas is not in predicted_step_us.
Plan build_plan(const Graph& graph, const GraphCosts& costs, const StageAssignment& assignment,
                const PartitionOptions& options);

}  // namespace smp::partitioner
