// Roles of values, from what crosses between stages.
#include "partitioner/plan/stage_roles.h"

namespace smp::partitioner {

StageRoles stage_roles(const Graph& graph, const Plan& plan, int stage) {
  StageRoles roles;
  const auto is_here = [&](ValueId id) {
    const NodeId producer = graph.values[id].producer;
    return producer != kNoNode && plan.stage_of_node[producer] == stage;
  };
  for (const Transfer& transfer : plan.activations) {
    const bool is_held = transfer.source == kInputStage && plan.stages[stage].rank == 0;
    if (transfer.target == stage && !is_held) roles.received.insert(transfer.value);
    if (transfer.source == stage) roles.kept.insert(transfer.value);
  }
  for (const Transfer& relay : plan.gradients) {
    if (relay.target == stage) roles.roots.insert(relay.value);
  }
  for (ValueId id : graph.returned) {
    if (is_here(id)) roles.results.insert(id);
  }
  for (ValueId id : graph.read) {
    if (is_here(id)) roles.kept.insert(id);
  }
  for (ValueId root : graph.backward_roots) {
    if (is_here(root)) roles.roots.insert(root);
  }
  return roles;
}

}  // namespace smp::partitioner
