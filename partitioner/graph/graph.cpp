// Sizes of tensors and inputs of nodes.
#include "partitioner/graph/graph.h"

#include <algorithm>

namespace smp::partitioner {

int64_t TensorSpec::num_elements() const {
  int64_t product = 1;
  for (int64_t size : sizes) product *= size;
  return product;
}

int64_t TensorSpec::num_bytes() const { return num_elements() * static_cast<int64_t>(c10::elementSize(dtype)); }

bool Graph::is_backward_root(ValueId value) const {
  return std::find(backward_roots.begin(), backward_roots.end(), value) != backward_roots.end();
}

size_t Graph::num_storages() const {
  int64_t last = -1;
  for (const Value& value : values) last = std::max<int64_t>(last, value.storage);
  for (const Node& node : nodes) {
    for (int32_t storage : node.written_storages) last = std::max<int64_t>(last, storage);
  }
  return static_cast<size_t>(last + 1);
}

std::vector<ValueId> node_inputs(const Node& node) {
  std::vector<ValueId> inputs;
  const auto add = [&inputs](ValueId id) {
    if (id == kNoValue || std::find(inputs.begin(), inputs.end(), id) != inputs.end()) return;
    inputs.push_back(id);
  };
  for (const Argument& argument : node.arguments) {
    if (const auto* value = std::get_if<ValueRef>(&argument)) add(value->id);
    if (const auto* list = std::get_if<ValueRefList>(&argument)) {
      for (ValueId id : list->ids) add(id);
    }
  }
  return inputs;
}

}  // namespace smp::partitioner
