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

namespace {

BackwardValues backward_values(const Graph& graph, const Plan& plan, int stage, int backward) {
  std::set<ValueId> roots, results;
  for (const Transfer& transfer : plan.gradients) {
    if (transfer.backward != backward) continue;
    if (transfer.target == stage) roots.insert(transfer.value);
    if (transfer.source == stage) results.insert(transfer.value);
  }
  const ValueId loss = graph.backward_roots[static_cast<size_t>(backward)];
  BackwardValues values{.roots = {roots.begin(), roots.end()}, .results = {results.begin(), results.end()}};
  values.has_loss = stage_of_value(graph, plan, loss) == stage;
  if (values.has_loss) values.roots.insert(values.roots.begin(), loss);
  return values;
}

}  // namespace

StageValues stage_values(const Graph& graph, const Plan& plan, int stage) {
  std::set<ValueId> inputs, outputs;
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
  for (const auto* ids : {&graph.returned, &graph.read, &graph.backward_roots}) {
    for (ValueId id : *ids) {
      if (stage_of_value(graph, plan, id) == stage) outputs.insert(id);
    }
  }
  StageValues values{.inputs = {inputs.begin(), inputs.end()}, .outputs = {outputs.begin(), outputs.end()}, .backwards = {}};
  for (size_t k = 0; k < graph.backward_roots.size(); ++k) {
    values.backwards.push_back(backward_values(graph, plan, stage, static_cast<int>(k)));
    values.has_backward = values.has_backward || !values.backwards.back().roots.empty();
  }
  return values;
}

}  // namespace smp::runtime
