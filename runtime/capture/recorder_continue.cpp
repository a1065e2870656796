// Recorder::continue_from: takes over the matched part of an earlier recording when a run starts to differ from it.
#include <algorithm>

#include "runtime/capture/arguments.h"
#include "runtime/capture/autocast.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/places.h"
#include "runtime/capture/recorder.h"

namespace smp::runtime {

using namespace partitioner;

ValueId values_of_prefix(const Graph& graph, NodeId num_nodes) {
  auto count = static_cast<ValueId>(graph.inputs.size());
  const auto note = [&count](const std::vector<ValueId>& ids) {
    for (ValueId id : ids) count = std::max(count, id + 1);
    return std::any_of(ids.begin(), ids.end(), [](ValueId id) { return id != kNoValue; });
  };
  for (NodeId n = num_nodes; n-- > 0;) {
    note(node_inputs(graph.nodes[n]));
    if (note(graph.nodes[n].outputs)) break;  // all earlier ones have smaller numbers
  }
  return count;
}

void Recorder::continue_from(const CapturedBody& matched, std::vector<at::Tensor> seen,
                             const std::vector<ConstantTensor>& used, const std::vector<ValueId>& copied,
                             NodeId num_nodes) {
  const Recording& old = *matched.recording;
  Recording& recording = *recording_;
  const ValueId num_values = values_of_prefix(old.graph, num_nodes);
  ghost_grad_fn_ = old.grad_fn;
  for (ValueId first : copied) copied_.emplace(first, seen[first]);
  recording.graph.inputs = old.graph.inputs;
  recording.graph.values.assign(old.graph.values.begin(), old.graph.values.begin() + num_values);
  recording.same_impl.assign(old.same_impl.begin(), old.same_impl.begin() + num_values);
  std::vector<at::Tensor> geometry = seen;
  for (const ConstantTensor& constant : used) {
    if (constant.value >= num_values) continue;
    seen[constant.value] = constant.tensor;
    geometry[constant.value] = constant.content;
    recording.constants.push_back(constant);
  }
  std::vector<at::Tensor> live(static_cast<size_t>(num_values));
  for (ValueId id = 0; id < num_values; ++id) {
    const Value& value = old.graph.values[id];
    num_storages_ = std::max(num_storages_, value.storage + 1);
    if (value.kind == ValueKind::kResult) continue;
    const bool stands_for_itself = value.is_wrapped_number || value.kind == ValueKind::kInput;
    adopt(id, seen[id], stands_for_itself ? seen[id] : make_twin(geometry[id]), live);
  }
  for (NodeId n = 0; n < num_nodes; ++n) {
    recording.graph.nodes.push_back(old.graph.nodes[n]);
    recording.calls.push_back(old.calls[n]);
    for (const ScalarOverride& changed : matched.scalars) {
      if (changed.node == n) recording.graph.nodes.back().arguments[changed.argument] = changed.value;
    }
    run_again(n, seen, live);
  }
}

// The copy that a torch:: factory made of the ghost of an earlier run.
bool Recorder::take_copy(const at::Tensor& tensor, ValueId first, at::Tensor& stand_in) {
  const auto copied = copied_.find(first);
  if (copied == copied_.end()) return false;
  const Identity ghost = identities_.at(copied->second.unsafeGetTensorImpl());
  if (tensor.requires_grad() || !same_geometry(tensor, recording_->graph.values[ghost.value].spec)) return false;
  stand_in = ghost.stand_in.defined() ? ghost.stand_in : copied->second;
  identities_.insert_or_assign(
      tensor.unsafeGetTensorImpl(),
      Identity{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr()), ghost.value, stand_in,
               history_of(tensor)});
  held_.push_back(tensor);
  copied_.erase(copied);
  return true;
}

// What in-place operators change about the tensors that the body holds, beside their content.
void Recorder::note_changes(Recording& recording) const {
  const auto& values = recording.graph.values;
  std::vector<bool> requires_grad(values.size());  // by first value: as far as the operators so far go
  for (size_t v = 0; v < values.size(); ++v) requires_grad[v] = values[v].spec.requires_grad;
  for (size_t n = 0; n < recording.calls.size(); ++n) {
    RecordedCall& call = recording.calls[n];
    call.changes_gradient = false;
    for (ValueId id : recording.graph.nodes[n].outputs) {
      if (id == kNoValue || recording.same_impl[id] == id) continue;
      const ValueId first = recording.same_impl[id];
      const bool changes_gradient = requires_grad[first] != values[id].spec.requires_grad;
      if (changes_gradient) requires_grad[first] = values[id].spec.requires_grad;
      call.changes_gradient = call.changes_gradient || changes_gradient;
      if (changes_gradient || call.info->changes_geometry_in_place) recording.changed.push_back(first);
    }
  }
}

void Recorder::run_again(NodeId n, const std::vector<at::Tensor>& seen, std::vector<at::Tensor>& live) {
  const Node& node = recording_->graph.nodes[n];
  const RecordedCall& call = recording_->calls[n];
  const bool has_tensors = !node_inputs(node).empty();
  torch::jit::Stack stack;
  GhostAccess access;
  const ValueToTensor tensor_of = [&](ValueId id) {
    access.allow(live[id]);
    return live[id];
  };
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    c10::IValue boxed = to_ivalue(node.arguments[i], tensor_of, c10::Device(c10::kMeta));
    const bool rewrite = call.info->argument_is_device[i] && (boxed.isDevice() || !has_tensors);
    stack.push_back(rewrite ? c10::IValue(c10::Device(c10::kMeta)) : std::move(boxed));
  }
  {
    const AmbientModes modes(node);
    call_on_ghosts(call.op, stack);
  }
  const auto outputs = flatten_outputs(stack);
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (node.outputs[k] != kNoValue) adopt(node.outputs[k], seen[node.outputs[k]], outputs[k], live);
  }
  note_histories(node);
  written_.insert(node.written_storages.begin(), node.written_storages.end());
  if (call.info->makes_uninitialised) {
    for (ValueId id : node.outputs) uninitialised_.insert(recording_->graph.values[id].storage);
  } else {
    for (int32_t storage : node.written_storages) uninitialised_.erase(storage);
  }
  if (call.info->is_random) ++num_random_;
  last_module_ = node.module;
}

void Recorder::adopt(ValueId id, const at::Tensor& seen, const at::Tensor& stand_in, std::vector<at::Tensor>& live) {
  live[id] = stand_in;
  held_.push_back(stand_in);
  held_.push_back(seen);
  const Value& value = recording_->graph.values[id];
  if (!value.is_wrapped_number) {
    for (const at::Tensor& tensor : {seen, stand_in}) {
      const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      storages_.try_emplace(storage,
                            StorageInfo{tensor.storage().getWeakStorageImpl(), value.storage, id, stand_in});
    }
  }
  Identity identity{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(seen.getIntrusivePtr()), id,
                    stand_in.is_same(seen) ? at::Tensor() : stand_in, history_of(seen)};
  identities_.insert_or_assign(seen.unsafeGetTensorImpl(), std::move(identity));
}

}  // namespace smp::runtime
