// The contradictions that a plan must not contain.
#include "partitioner/plan/check_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

#include "partitioner/graph/cuts.h"
#include "partitioner/graph/gradient_flow.h"
#include "partitioner/plan/crossings.h"
#include "partitioner/plan/linearise.h"

namespace smp::partitioner {
namespace {

constexpr const char* kFix = " Plan this graph again with partition().";

void check_stages(const Graph& graph, const Plan& plan) {
  TORCH_CHECK_VALUE(plan.stage_of_node.size() == graph.nodes.size(), "plan: expected a stage for each of ",
                    graph.nodes.size(), " nodes, got ", plan.stage_of_node.size(), ".", kFix);
  std::vector<int> seen(graph.nodes.size(), 0);
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    const StagePlan& stage = plan.stages[s];
    TORCH_CHECK_VALUE(stage.rank >= 0 && stage.rank < plan.num_ranks, "plan: expected stage ", s, " on a rank from 0 to ",
                      plan.num_ranks - 1, ", got ", stage.rank, ".", kFix);
    TORCH_CHECK_VALUE(!stage.nodes.empty(), "plan: expected operators on stage ", s, ", got none.", kFix);
    TORCH_CHECK_VALUE(std::is_sorted(stage.nodes.begin(), stage.nodes.end()), "plan: expected the nodes of stage ", s,
                      " in program order.", kFix);
    for (NodeId n : stage.nodes) {
      const bool is_known = n >= 0 && n < static_cast<NodeId>(graph.nodes.size());
      TORCH_CHECK_VALUE(is_known && plan.stage_of_node[n] == static_cast<int>(s) && ++seen[n] == 1,
                        "plan: expected every node once, on its stage_of_node; stage ", s, " has node ", n, ".", kFix);
    }
  }
  TORCH_CHECK_VALUE(std::count(seen.begin(), seen.end(), 1) == static_cast<int64_t>(seen.size()),
                    "plan: expected every node on a stage, got one on none.", kFix);
}

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
                        ", where what it reads is made, or later, got stage ", stage, ".", kFix);
      if (!flow.passes_gradient(static_cast<NodeId>(n))) continue;
      const int32_t sum = sums.sum_of_value[id];
      TORCH_CHECK_VALUE(!sums.is_ordered[sum] || stage >= last_stage[sum], "plan: expected the stages that read value ", id,
                        " not to fall along the program, since the terms of its gradient must add up in one order.", kFix);
      last_stage[sum] = stage;
    }
  }
}

void check_groups(const Graph& graph, const Plan& plan) {
  const std::vector<NodeId> first_of_group = node_groups(graph);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    TORCH_CHECK_VALUE(plan.stage_of_node[n] == plan.stage_of_node[first_of_group[n]], "plan: expected nodes ",
                      first_of_group[n], " (", graph.nodes[first_of_group[n]].op, ") and ", n, " (", graph.nodes[n].op,
                      ") on one stage: they share a written storage or a value that cannot be sent.", kFix);
  }
}

void check_parameters(const Graph& graph, const Plan& plan) {
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    std::set<ValueId> read;
    for (NodeId n : plan.stages[s].nodes) {
      for (ValueId id : node_inputs(graph.nodes[n])) {
        const ValueKind kind = graph.values[id].kind;
        if (kind == ValueKind::kParameter || kind == ValueKind::kBuffer) read.insert(id);
      }
    }
    const auto& listed = plan.stages[s].parameters;
    TORCH_CHECK_VALUE(listed.size() == read.size() && std::set(listed.begin(), listed.end()) == read,
                      "plan: expected stage ", s, " to list the ", read.size(),
                      " parameters and buffers that it reads, got ", listed.size(), ".", kFix);
  }
}

void check_transfers(const Graph& graph, const Plan& plan) {
  TORCH_CHECK_VALUE(plan.activations == activation_transfers(graph, plan.stage_of_node),
                    "plan: expected one activation transfer per value and reading stage, ordered by (value, target), got ",
                    plan.activations.size(), " that are not these.", kFix);
  TORCH_CHECK_VALUE(plan.gradients == gradient_relays(graph, plan),
                    "plan: expected the gradient of each value relayed from its last reader to its producer, got ",
                    plan.gradients.size(), " relays that are not these.", kFix);
}

}  // namespace

void check(const Graph& graph, const Plan& plan) {
  check_stages(graph, plan);
  check_order(graph, plan);
  check_groups(graph, plan);
  check_parameters(graph, plan);
  check_transfers(graph, plan);
}

}  // namespace smp::partitioner
