// What the recorder adds to the graph for values that the body reads: their content is wanted as it is then, and the stages
// hand it over when all operators have run.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "runtime/capture/recorder.h"
#include "runtime/libtorch/boxed_tensors.h"

namespace smp::runtime {

using namespace partitioner;

// Buffers, and parameters that the body has written to, are copied at once: a later microbatch may write to them before the
// value is handed over. A parameter that no operator has used yet gets one that does, so that some rank holds it.
ValueId Recorder::add_read(ValueId value, NodeId position) {
  Graph& graph = recording_->graph;
  ValueId kept = kept_value(*recording_, value, position);
  TORCH_INTERNAL_ASSERT(kept != kNoValue, "value ", value, " was written to after it was read, and no copy was kept");
  const int32_t storage = graph.values[value].storage;
  const bool may_change = std::any_of(graph.values.begin(), graph.values.end(), [&](const Value& other) {
    return other.storage == storage && is_named(other) && (other.kind == ValueKind::kBuffer || rules_.is_written(storage));
  });
  const bool is_used = std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
    const auto inputs = node_inputs(node);
    return std::find(inputs.begin(), inputs.end(), value) != inputs.end();
  });
  if (kept == value && (may_change || (is_named(graph.values[value]) && !is_used))) kept = keep_content(value);
  if (std::find(graph.read.begin(), graph.read.end(), kept) == graph.read.end()) graph.read.push_back(kept);
  return kept;
}

// To be called before the arguments of the operator have got values, so that values stay in order of appearance.
void Recorder::keep_before_write(const OperatorInfo& info, const torch::jit::Stack& stack) {
  Graph& graph = recording_->graph;
  if (graph.read.empty()) return;
  const auto keep = [&](int, const at::Tensor& written) {
    const StorageInfo* storage = written.has_storage() ? find_storage(written) : nullptr;
    if (storage == nullptr) return;
    for (size_t k = 0; k < graph.read.size(); ++k) {
      if (graph.values[graph.read[k]].storage == storage->id) graph.read[k] = keep_content(graph.read[k]);
    }
  };
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  for (size_t i = 0; i < info.argument_written.size(); ++i) {
    if (info.argument_written[i]) for_each_tensor(stack[first + i], keep);
  }
}

ValueId Recorder::keep_content(ValueId value) {
  const at::NoGradGuard no_grad;
  const TensorSpec& source = recording_->graph.values[value].spec;
  const at::Tensor twin = at::empty_strided(source.sizes, source.strides, at::TensorOptions(at::kMeta).dtype(source.dtype));
  TensorSpec spec = spec_of(twin.clone());
  return synthesise("aten::clone", {ValueRef{value}, std::monostate()}, std::move(spec), num_storages_++, false);
}

// An operator that no run of the body calls.
ValueId Recorder::synthesise(const char* name, std::vector<Argument> arguments, TensorSpec spec, int32_t storage,
                             bool grad_enabled) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  Node node{.op = name, .overload = "", .arguments = std::move(arguments), .module = last_module_};
  node.grad_enabled = grad_enabled;
  const auto node_id = static_cast<NodeId>(recording_->graph.nodes.size());
  const auto id = static_cast<ValueId>(recording_->graph.values.size());
  node.outputs = {id};
  spec.requires_grad = false;
  recording_->graph.values.push_back(
      {.kind = ValueKind::kResult, .spec = std::move(spec), .producer = node_id, .storage = storage});
  recording_->same_impl.push_back(id);
  recording_->graph.nodes.push_back(std::move(node));
  recording_->calls.push_back({.op = op, .info = &operator_info(op), .synthesised = true});
  return id;
}

}  // namespace smp::runtime
