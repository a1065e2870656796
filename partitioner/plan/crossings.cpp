// Reading stages of every value, forward and backward.
#include "partitioner/plan/crossings.h"

#include <algorithm>

namespace smp::partitioner {
namespace {

/// By ValueId: the stages whose nodes read it, ascending; only nodes that backward passes through, if asked.
std::vector<std::vector<int>> reading_stages(const Graph& graph, const std::vector<int>& stage_of_node,
                                             const GradientFlow* only_with_gradient) {
  std::vector<std::vector<int>> stages(graph.values.size());
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (only_with_gradient && !only_with_gradient->passes_gradient(static_cast<NodeId>(n))) continue;
    for (ValueId id : node_inputs(graph.nodes[n])) {
      auto& of_value = stages[id];
      if (of_value.empty() || of_value.back() != stage_of_node[n]) {
        of_value.push_back(stage_of_node[n]);
      }
    }
  }
  for (auto& of_value : stages) {
    std::sort(of_value.begin(), of_value.end());
    of_value.erase(std::unique(of_value.begin(), of_value.end()), of_value.end());
  }
  return stages;
}

}  // namespace

std::vector<Transfer> activation_transfers(const Graph& graph, const std::vector<int>& stage_of_node) {
  std::vector<Transfer> transfers;
  const auto readers = reading_stages(graph, stage_of_node, nullptr);
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const Value& value = graph.values[v];
    const bool is_input = value.kind == ValueKind::kInput;
    if (!is_input && value.kind != ValueKind::kResult) continue;
    const int source = is_input ? kInputStage : stage_of_node[value.producer];
    for (int target : readers[v]) {
      if (target != source) transfers.push_back({static_cast<ValueId>(v), source, target});
    }
  }
  return transfers;
}

namespace {

/// From the last reader down to the producer.
void add_value_relays(ValueId id, const std::vector<int>& readers, int producer, int backward,
                      std::vector<Transfer>& relays) {
  int source = -1;
  for (auto stage = readers.rbegin(); stage != readers.rend(); ++stage) {
    if (source >= 0) relays.push_back({id, source, *stage, backward});
    source = *stage;
  }
  if (source > producer) relays.push_back({id, source, producer, backward});
}

/// Between the stages of one rank, or of all with exact ties. Readers in another backward count:
/// they all see one leaf, which lives on the first of them.
void add_parameter_relays(ValueId id, const std::vector<int>& readers, const Plan& plan, int backward,
                          std::vector<Transfer>& relays) {
  for (size_t i = readers.size(); i-- > 0;) {
    const int rank = plan.stages[readers[i]].rank;
    for (size_t before = i; before-- > 0;) {
      if (!plan.exact_ties && plan.stages[readers[before]].rank != rank) continue;
      relays.push_back({id, readers[i], readers[before], backward});
      break;
    }
  }
}

}  // namespace

std::vector<Transfer> gradient_relays(const Graph& graph, const Plan& plan) {
  const std::vector<int>& stage_of_node = plan.stage_of_node;
  std::vector<Transfer> relays;
  const GradientFlow any(graph);
  const auto readers_in_any = reading_stages(graph, stage_of_node, &any);
  for (size_t k = 0; k < graph.backward_roots.size(); ++k) {
    const GradientFlow gradients(graph, {graph.backward_roots[k]});
    const auto readers = reading_stages(graph, stage_of_node, &gradients);
    for (size_t v = 0; v < graph.values.size(); ++v) {
      const auto id = static_cast<ValueId>(v);
      const Value& value = graph.values[v];
      if (value.kind == ValueKind::kParameter && value.spec.requires_grad) {
        add_parameter_relays(id, readers_in_any[v], plan, static_cast<int>(k), relays);
      }
      if (value.kind != ValueKind::kResult || !gradients.receives_gradient(id)) continue;
      add_value_relays(id, readers[v], stage_of_node[value.producer], static_cast<int>(k), relays);
    }
  }
  return relays;
}

}  // namespace smp::partitioner
