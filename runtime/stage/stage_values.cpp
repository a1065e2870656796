// Derives a stage's interface from the transfers of a plan.
#include "runtime/stage/stage_values.h"

#include <algorithm>
#include <set>

namespace smp::runtime {

using namespace partitioner;

int stage_of_value(const Graph& graph, const Plan& plan, ValueId value) {
  const NodeId producer = graph.values[value].producer;
  return producer == kNoNode ? kInputStage : plan.stage_of_node[producer];
}

int rank_of_value(const Graph& graph, const Plan& plan, ValueId value) {
  const int stage = stage_of_value(graph, plan, value);
  if (stage != kInputStage) return plan.stages[stage].rank;
  for (const StagePlan& candidate : plan.stages) {
    const auto& held = candidate.parameters;
    if (std::find(held.begin(), held.end(), value) != held.end()) return candidate.rank;
  }
  return 0;
}

StageValues stage_values(const Graph& graph, const Plan& plan, int stage) {
  std::set<ValueId> inputs, outputs, roots, results;
  for (const Transfer& transfer : plan.activations) {
    if (transfer.target == stage) inputs.insert(transfer.value);
    if (transfer.source == stage) outputs.insert(transfer.value);
  }
  // Step inputs used on the leader's own stages need no transfer in the plan's sense.
  for (NodeId n : plan.stages[stage].nodes) {
    for (ValueId id : node_inputs(graph.nodes[n])) {
      if (graph.values[id].kind == ValueKind::kInput) inputs.insert(id);
    }
  }
  for (ValueId id : graph.returned) {
    if (stage_of_value(graph, plan, id) == stage) outputs.insert(id);
  }
  for (const Transfer& transfer : plan.gradients) {
    if (transfer.target == stage) roots.insert(transfer.value);
    if (transfer.source == stage) results.insert(transfer.value);
  }
  StageValues values{.inputs = {inputs.begin(), inputs.end()},
                     .outputs = {outputs.begin(), outputs.end()},
                     .gradient_roots = {roots.begin(), roots.end()},
                     .gradient_results = {results.begin(), results.end()}};
  values.has_loss = graph.has_backward() && stage_of_value(graph, plan, graph.backward_root) == stage;
  if (values.has_loss) values.gradient_roots.insert(values.gradient_roots.begin(), graph.backward_root);
  values.has_backward = !values.gradient_roots.empty();
  return values;
}

}  // namespace smp::runtime
