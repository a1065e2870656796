// Fills a Plan from the decision "which stage runs which node": what crosses, what it costs, what it holds, and the
// predicted step.
#pragma once

#include <vector>

#include "partitioner/partition/graph_costs.h"
#include "partitioner/plan/options.h"
#include "partitioner/plan/plan.h"
#include "partitioner/schedule/schedule.h"

namespace smp::partitioner {

/// All that a plan is made from; borrowed.
struct PlanInput {
  const Graph& graph;
  const GraphCosts& costs;
  const PlanRequest& request;
  const Machine& machine;
  const RuntimeBehaviour& behaviour;
  Recomputation recomputation{};  // its work is in `costs`

  PlanInput with(const PlanRequest& other) const { return {graph, costs, other, machine, behaviour, recomputation}; }
  /// Of the node's backward: the gradients of its parameters, where they wait (RuntimeBehaviour).
  double weight_us(NodeId n) const;
};

struct StageAssignment {
  std::vector<int> stage_of_node;  // never falls along the program
  std::vector<int> rank_of_stage;
};

/// The table that predictions of `plan` are of.
Schedule schedule_of(const Plan& plan, const Graph& graph, int num_microbatches);

/// All of a plan, of one pipeline: the averaging over replicas is not in predicted_step_us.
Plan build_plan(const PlanInput& input, const StageAssignment& assignment);

}  // namespace smp::partitioner
