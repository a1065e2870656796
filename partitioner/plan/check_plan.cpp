// The contradictions that a plan must not contain.
#include "partitioner/plan/check_plan.h"

#include <c10/util/Exception.h>

#include "partitioner/graph/cuts.h"
#include "partitioner/graph/gradient_flow.h"
#include "partitioner/plan/derive.h"
#include "partitioner/plan/linearise.h"

namespace smp::partitioner {
namespace {

/// What an operator reads comes from its own stage or an earlier one; the terms of a gradient add
/// up in program order (linearise.h).
void check_order(const Graph& graph, const Plan& plan) {
  const GradientFlow flow(graph);
  const GradientSums sums(graph);
  std::vector<int> last_stage(sums.is_ordered.size(), -1);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const int stage = plan.stage_of_node[n];
    for (ValueId id : node_inputs(graph.nodes[n])) {
      const NodeId producer = graph.values[id].producer;
      const int made_on = producer == kNoNode ? 0 : plan.stage_of_node[producer];
      TORCH_CHECK_VALUE(made_on <= stage, "plan: expected node ", n, " (", graph.nodes[n].op, ") on stage ", made_on,
                        ", where what it reads is made, or later, got stage ", stage, ".", kPlanAgain);
      if (!flow.passes_gradient(static_cast<NodeId>(n))) continue;
      const int32_t sum = sums.sum_of_value[id];
      TORCH_CHECK_VALUE(!sums.is_ordered[sum] || stage >= last_stage[sum], "plan: expected the stages that read value ", id,
                        " not to fall along the program, since the terms of its gradient must add up in one order.",
                        kPlanAgain);
      last_stage[sum] = stage;
    }
  }
}

void check_groups(const Graph& graph, const Plan& plan) {
  const std::vector<NodeId> first_of_group = node_groups(graph);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    TORCH_CHECK_VALUE(plan.stage_of_node[n] == plan.stage_of_node[first_of_group[n]], "plan: expected nodes ",
                      first_of_group[n], " (", graph.nodes[first_of_group[n]].op, ") and ", n, " (", graph.nodes[n].op,
                      ") on one stage: they share a written storage or a value that cannot be sent.", kPlanAgain);
  }
}

}  // namespace

void check(const Graph& graph, const Plan& plan) {
  check_order(graph, plan);
  check_groups(graph, plan);
}

}  // namespace smp::partitioner
