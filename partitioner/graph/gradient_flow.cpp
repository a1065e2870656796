// Reverse walk over the program.
#include "partitioner/graph/gradient_flow.h"

#include <algorithm>

namespace smp::partitioner {

GradientFlow::GradientFlow(const Graph& graph, const std::vector<ValueId>& roots)
    : graph_(graph), value_(graph.values.size()), passes_gradient_(graph.nodes.size()) {
  if (roots.empty()) return;
  find_written_storages();
  for (ValueId root : roots) mark(root);
  for (size_t n = graph.nodes.size(); n-- > 0;) {
    const Node& node = graph.nodes[n];
    passes_gradient_[n] = visit(node);
    if (!passes_gradient_[n]) continue;
    for (ValueId id : node_inputs(node)) {
      if (requires_gradient(id) && is_differentiated(node, id)) mark(id);
    }
  }
}

void GradientFlow::find_written_storages() {
  is_written_.assign(graph_.num_storages(), false);
  storage_.assign(graph_.num_storages(), false);
  for (const Node& node : graph_.nodes) {
    const std::vector<ValueId> inputs = node_inputs(node);
    const bool writes_gradient =
        node.grad_enabled && std::any_of(inputs.begin(), inputs.end(), [this](ValueId id) { return requires_gradient(id); });
    if (!writes_gradient) continue;
    for (int32_t storage : node.written_storages) {
      const auto is_differentiable_result = [&](ValueId id) {
        return id != kNoValue && graph_.values[id].storage == storage && graph_.values[id].spec.requires_grad;
      };
      // batch_norm writes its statistics without differentiating them: no output lies on their storage.
      if (std::any_of(node.outputs.begin(), node.outputs.end(), is_differentiable_result)) {
        is_written_[storage] = true;
      }
    }
  }
}

bool GradientFlow::requires_gradient(ValueId id) const {
  const Value& value = graph_.values[id];
  return value.spec.requires_grad || (value.storage >= 0 && is_written_[value.storage]);
}

void GradientFlow::mark(ValueId id) {
  value_[id] = true;
  const int32_t storage = graph_.values[id].storage;
  if (storage >= 0 && is_written_[storage]) storage_[storage] = true;
}

bool GradientFlow::receives_gradient(ValueId id) const {
  const int32_t storage = graph_.values[id].storage;
  return value_[id] || (storage >= 0 && !storage_.empty() && storage_[storage]);
}

bool GradientFlow::is_differentiated(const Node& node, ValueId id) const {
  const int32_t storage = graph_.values[id].storage;
  const auto& written = node.written_storages;
  if (node.grad_enabled || std::find(written.begin(), written.end(), storage) != written.end()) return true;
  // Also without gradients an operator may give back its argument itself, as to() does with one of that type.
  const auto is_trained_there = [&](ValueId other) {
    return other != kNoValue && graph_.values[other].storage == storage && requires_gradient(other);
  };
  const std::vector<ValueId> inputs = node_inputs(node);
  return storage >= 0 && std::any_of(inputs.begin(), inputs.end(), is_trained_there) &&
         std::any_of(node.outputs.begin(), node.outputs.end(), is_trained_there);
}

bool GradientFlow::visit(const Node& node) const {
  return std::any_of(node.outputs.begin(), node.outputs.end(),
                     [&](ValueId id) { return id != kNoValue && receives_gradient(id) && is_differentiated(node, id); });
}

}  // namespace smp::partitioner
