// Replaces the ghosts a body saw by fresh ones, so that a ghost kept beyond its run is recognised.
#include "runtime/capture/ghosts.h"
#include "runtime/capture/places.h"
#include "runtime/capture/recorder.h"
#include "runtime/libtorch/memory_tensor.h"

#include <algorithm>

namespace smp::runtime {

using namespace partitioner;

namespace {

bool is_ghost(const Recording& recording, ValueId first) {
  const ValueKind kind = recording.graph.values[first].kind;
  return kind == ValueKind::kResult || kind == ValueKind::kInput;
}

std::string maker_of(const Graph& graph, ValueId id) {
  const Value& value = graph.values[id];
  if (value.producer == kNoNode) {
    const auto position = std::find(graph.inputs.begin(), graph.inputs.end(), id) - graph.inputs.begin();
    return "step argument " + std::to_string(position);
  }
  const Node& node = graph.nodes[value.producer];
  return describe_place("the result of " + node.op, module_in_texts(graph, id, node.module));
}

}  // namespace

void restore_ghosts(Recording& recording) {
  const auto& values = recording.graph.values;
  const auto restore = [&](ValueId first) {
    const at::Tensor& ghost = recording.tensors[first];
    set_geometry(ghost, values[first].spec);
    if (is_ghost(recording, first)) set_gradient(ghost, values[first].spec.requires_grad, recording.grad_fn);
  };
  for (ValueId first : recording.changed) restore(first);
  if (!recording.any_changed) return;
  recording.grad_fn = make_refuse_backward();  // the other one may have hooks
  for (ValueId v = 0; v < static_cast<ValueId>(values.size()); ++v) {
    if (recording.same_impl[v] != v || !is_ghost(recording, v)) continue;
    recording.tensors[v].unsafeGetTensorImpl()->set_autograd_meta(nullptr);
    restore(v);
  }
  recording.any_changed = false;
}

void make_ghosts(Recording& recording, const std::vector<bool>* only_storages) {
  const auto& values = recording.graph.values;
  int32_t num_storages = 0;
  for (const Value& value : values) num_storages = std::max(num_storages, value.storage + 1);
  std::vector<int64_t> bytes(static_cast<size_t>(num_storages), 0);
  for (size_t v = 0; v < values.size(); ++v) {
    auto& slot = bytes[static_cast<size_t>(values[v].storage)];
    const TensorSpec& spec = values[v].spec;
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(spec.dtype));
    slot = std::max(slot, extent_bytes(spec.sizes, spec.strides, element_bytes, spec.storage_offset));
  }
  std::vector<c10::Storage> storages(bytes.size());
  if (!recording.grad_fn) recording.grad_fn = make_refuse_backward();
  for (size_t v = 0; v < values.size(); ++v) {
    const auto first = static_cast<size_t>(recording.same_impl[v]);
    if (!is_ghost(recording, recording.same_impl[v])) {
      recording.tensors[v] = recording.tensors[first];
      continue;
    }
    const auto storage = static_cast<size_t>(values[v].storage);
    if (only_storages != nullptr && !(*only_storages)[storage]) continue;
    if (first != v) {
      recording.tensors[v] = recording.tensors[first];
      continue;
    }
    if (!storages[storage]) {
      storages[storage] = make_ghost_storage(bytes[storage], maker_of(recording.graph, static_cast<ValueId>(v)));
    }
    recording.tensors[v] = make_ghost(values[v].spec, storages[storage], recording.grad_fn);
  }
}

}  // namespace smp::runtime
