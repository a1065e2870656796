// Recorder::continue_from: takes over the matched part of an earlier recording when a run starts to differ from it.
#include <algorithm>

#include "runtime/capture/arguments.h"
#include "runtime/capture/devices.h"
#include "runtime/capture/places.h"
#include "runtime/capture/recorder.h"
#include "runtime/device/device.h"

namespace smp::runtime {

using namespace partitioner;

void Recorder::continue_from(const CapturedBody& matched, const std::vector<at::Tensor>& seen,
                             const std::vector<c10::Storage>& storages, const std::vector<ConstantTensor>& used,
                             NodeId num_nodes) {
  const Recording& old = *matched.recording;
  Recording& recording = *recording_;
  const ValueId num_values = values_of_prefix(old.graph, num_nodes);
  recording.graph.inputs = old.graph.inputs;
  recording.graph.values.assign(old.graph.values.begin(), old.graph.values.begin() + num_values);
  recording.same_impl.assign(old.same_impl.begin(), old.same_impl.begin() + num_values);
  for (const Value& value : recording.graph.values) num_storages_ = std::max(num_storages_, value.storage + 1);
  for (const auto& [id, signs] : old.signs) {
    if (id < num_values) recording.signs.emplace(id, signs);
  }
  recording.storages.assign(storages.begin(), storages.begin() + num_storages_);
  std::vector<at::Tensor> live(static_cast<size_t>(num_values));
  for (ValueId id = 0; id < num_values; ++id) {
    const Value& value = recording.graph.values[id];
    if (is_named(value)) take_real(id, live[id] = seen[id], seen[id]);
    if (value.kind == ValueKind::kInput) {
      const auto position = std::find(old.graph.inputs.begin(), old.graph.inputs.end(), id) - old.graph.inputs.begin();
      adopt(id, live[id] = ghost_of_input(value.spec, static_cast<size_t>(position)));
    }
  }
  for (const ConstantTensor& constant : used) {
    if (constant.value >= num_values) continue;
    take_real(constant.value, live[constant.value] = constant.tensor, constant.content);
    recording.constants.push_back(constant);
  }
  for (NodeId n = 0; n < num_nodes; ++n) {
    recording.graph.nodes.push_back(old.graph.nodes[n]);
    recording.calls.push_back(old.calls[n]);
    for (const ScalarOverride& changed : matched.scalars) {
      if (changed.node == n) recording.graph.nodes.back().arguments[changed.argument] = changed.value;
    }
    run_again(n, live);
  }
  for (ValueId id = 0; id < num_values; ++id) {  // the body's own ghosts take the places of those made here
    const Ghost* made = as_ghost(live[id]);
    if (made == nullptr || as_ghost(seen[id]) == nullptr) continue;
    as_ghost(seen[id])->stand_in = made->stand_in;
    set_gradient(seen[id], made->stand_in.requires_grad(), run_);
    take_value(made->value, seen[id]);
  }
}

void Recorder::run_again(NodeId n, std::vector<at::Tensor>& live) {
  const Node& node = recording_->graph.nodes[n];
  const RecordedCall& call = recording_->calls[n];
  torch::jit::Stack stack;
  for (const Argument& argument : node.arguments) {
    stack.push_back(to_ivalue(argument, [&](ValueId id) { return live[id]; }, c10::Device(this_ranks_device().type)));
  }
  makes_on_ = &device_of_results(*call.info, stack, bindings_);
  {
    const AmbientModes ambient;
    set_modes(node.grad_enabled, node.autocast);
    calls_.operator_called(call.op, stack);
  }
  const auto outputs = flatten_outputs(stack);
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (node.outputs[k] != kNoValue) adopt(node.outputs[k], live[node.outputs[k]] = outputs[k]);
  }
  rules_.add(*call.info, node);
  if (call.info->is_random) ++num_random_;
  last_module_ = node.module;
}

// Its memory stays, so that copies which the body has made behind the dispatcher find it.
void Recorder::adopt(ValueId id, const at::Tensor& made) {
  if (as_ghost(made) != nullptr) {
    StorageInfo& storage = storage_info(stand_in_of(made));
    if (storage.id < 0) {
      storage.first_tensor = stand_in_of(made);
      name_storage(storage, recording_->graph.values[id].storage, id);
    }
  }
  take_value(id, made);
}

}  // namespace smp::runtime
