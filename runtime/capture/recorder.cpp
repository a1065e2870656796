// One operator call at a time.
#include "runtime/capture/recorder.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>

#include "partitioner/graph/graph_io.h"
#include "runtime/capture/arguments.h"
#include "runtime/capture/devices.h"
#include "runtime/capture/places.h"
#include "runtime/capture/recompute_regions.h"
#include "runtime/libtorch/boxed_tensors.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

// An operator that has nothing to do may return its argument, although its schema promises a new tensor: dropout does
// for p = 0.
bool returns_argument(const c10::OperatorHandle& op, const Graph& graph) {
  const Node& node = graph.nodes.back();
  for (const auto& result : op.schema().returns()) {
    if (result.alias_info() != nullptr) return false;
  }
  const auto read = node_inputs(node);
  return std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId output) {
    return output != kNoValue && std::any_of(read.begin(), read.end(), [&](ValueId id) {
             return graph.values[id].storage == graph.values[output].storage;
           });
  });
}

}  // namespace

std::vector<at::Tensor> Recorder::start(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> ghosts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Value value{.kind = ValueKind::kInput, .name = "input." + std::to_string(i), .spec = spec_of(inputs[i])};
    value.spec.requires_grad = false;
    ghosts.push_back(tensors_.ghost_of_input(value.spec, i));
    recording_->graph.inputs.push_back(tensors_.add(std::move(value), ghosts.back()));
  }
  return ghosts;
}

void Recorder::continue_from(const Match& matched, const std::vector<at::Tensor>& seen) {
  const Recording& old = *matched.recording;
  const ValueId num_values = values_of_prefix(old.graph, matched.position);
  recording_->graph.inputs = old.graph.inputs;
  recording_->graph.values.assign(old.graph.values.begin(), old.graph.values.begin() + num_values);
  recording_->same_impl.assign(old.same_impl.begin(), old.same_impl.begin() + num_values);
  int32_t num_memories = 0;
  for (const Value& value : recording_->graph.values) num_memories = std::max(num_memories, value.storage + 1);
  memories_.take_over(matched.storages, num_memories);
  for (const auto& [id, signs] : old.signs) {
    if (id < num_values) recording_->signs.emplace(id, signs);
  }
  std::vector<at::Tensor> live(static_cast<size_t>(num_values));
  for (ValueId id = 0; id < num_values; ++id) {
    const Value& value = recording_->graph.values[id];
    if (is_named(value)) tensors_.take_real(id, live[id] = seen[id], seen[id]);
    if (value.kind != ValueKind::kInput) continue;
    tensors_.adopt(id, live[id] = tensors_.ghost_of_input(value.spec, static_cast<size_t>(id)));  // inputs come first
  }
  for (const ConstantTensor& constant : matched.used) {
    if (constant.value >= num_values) continue;
    tensors_.take_real(constant.value, live[constant.value] = constant.tensor, constant.content);
    recording_->constants.push_back(constant);
  }
  for (NodeId n = 0; n < matched.position; ++n) {
    recording_->graph.nodes.push_back(old.graph.nodes[n]);
    recording_->calls.push_back(old.calls[n]);
    recording_->graph.nodes.back().recompute_region = old.calls[n].recompute_region;  // marked modules are looked for anew
    for (const ScalarOverride& changed : matched.run.scalars) {
      if (changed.node == n) recording_->graph.nodes.back().arguments[changed.argument] = changed.value;
    }
    run_again(n, live);
  }
  for (ValueId id = 0; id < num_values; ++id) {  // the body's own ghosts take the places of those made here
    const Ghost* made = as_ghost(live[id]);
    if (made == nullptr || as_ghost(seen[id]) == nullptr) continue;
    as_ghost(seen[id])->stand_in = made->stand_in;
    set_gradient(seen[id], made->stand_in.requires_grad(), run_);
    tensors_.take(made->value, seen[id]);
  }
}

void Recorder::run_again(NodeId n, std::vector<at::Tensor>& live) {
  const Node& node = recording_->graph.nodes[n];
  const RecordedCall& call = recording_->calls[n];
  torch::jit::Stack stack;
  for (const Argument& argument : node.arguments) {
    stack.push_back(to_ivalue(argument, [&](ValueId id) { return live[id]; }, c10::Device(this_ranks_device().type)));
  }
  memories_.set_device(device_of_results(*call.info, stack, bindings_));
  {
    const AmbientModes ambient;
    set_modes(node.grad_enabled, node.autocast);
    calls_.operator_called(call.op, stack);
  }
  const auto outputs = flatten_outputs(stack);
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (node.outputs[k] != kNoValue) tensors_.adopt(node.outputs[k], live[node.outputs[k]] = outputs[k]);
  }
  rules_.add(*call.info, node);
  if (call.info->is_random) ++num_random_;
  recording_->last_module = node.module;
}

void Recorder::refuse_unsupported(const OperatorInfo& info, const torch::jit::Stack& stack) const {
  const auto* arguments = &stack.end()[-info.num_arguments];
  for (size_t i = 0; i < info.argument_is_device.size(); ++i) {
    const bool is_meta = info.argument_is_device[i] && arguments[i].isDevice() && arguments[i].toDevice().is_meta();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_meta, describe_place(info.name, recording_->module()),
        ": expected tensors of the rank's device, got the meta device, whose tensors have no data to ",
        "compute with or to send. Ask the tensors themselves for sizes and dtypes. Nested tensors make one within: pad, and "
        "mask.");
  }
  switch (class_of_call(info, stack)) {
    case OperatorClass::kReadsValue:
      refuse_value_read(info.name, recording_->module());
    case OperatorClass::kDataDependentShape:
      refuse_data_dependent_shape(info.name, recording_->module());
    case OperatorClass::kReplacesData:
      refuse_replaced_data(info.name, recording_->module());
    case OperatorClass::kRunsBackward:
      refuse_backward();
    default:
      break;
  }
  if (info.name.starts_with("aten::_nested_")) refuse_nested(info.name, recording_->module());
  if (info.name == "aten::_make_dual") refuse_forward_mode(recording_->module());
}

void Recorder::operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OperatorInfo& info = operator_info(op);
  refuse_unsupported(info, stack);
  keep_before_write(info, stack);
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  const std::vector<c10::IValue> originals(stack.begin() + static_cast<ptrdiff_t>(first), stack.end());
  Node node{.op = info.name, .overload = info.overload, .grad_enabled = at::GradMode::is_enabled()};
  node.autocast = current_autocast();
  for (const c10::IValue& argument : originals) {
    node.arguments.push_back(
        to_argument(argument, [this](const at::Tensor& tensor) { return tensors_.resolve(tensor); }, info.name));
  }
  note_module(node);
  rules_.check_reads(info, node);
  if (info.is_random) node.random_ordinal = num_random_++;
  const std::string place = describe_place(info.name, recording_->module());
  memories_.set_maker("the result of " + place);
  memories_.set_device(device_of_results(info, stack, bindings_));
  try {
    calls_.operator_called(op, stack);
  } catch (c10::NotImplementedError& error) {
    const char* const way_out = ". What looks at data within may run by its own code: call it through smp::opaque";
    error.add_context("while capturing " + place + (info.name == "smp::opaque" ? "" : way_out));
    throw;
  } catch (c10::Error& error) {
    error.add_context("while capturing " + place);
    throw;
  }
  const bool returns_list = info.returned_argument.size() == 1 && stack.back().isTensorList();
  rules_.check_writes(info, node);
  hold_written(info, node, originals);
  const auto results = std::span(stack).last(info.returned_argument.size());
  for (const at::Tensor& tensor : flatten_outputs(results)) bind_output(node, tensor);
  rules_.add(info, node);
  RecordedCall call{.op = op, .info = &info, .returns_list = returns_list, .recompute_region = current_recompute_region()};
  node.recompute_region = call.recompute_region;
  call.gradients = tensors_.follow_writes(node.written_storages);
  recording_->graph.nodes.push_back(std::move(node));
  call.fixes_scalars = returns_argument(op, recording_->graph);
  recording_->calls.push_back(std::move(call));
}

void Recorder::note_module(Node& node) {
  for (ValueId id : node_inputs(node)) {
    const Value& value = recording_->graph.values[id];
    if (value.kind != ValueKind::kParameter && value.kind != ValueKind::kBuffer) continue;
    const size_t dot = value.name.rfind('.');
    recording_->last_module = dot == std::string::npos ? "" : value.name.substr(0, dot);
  }
  node.module = recording_->last_module;
}

void Recorder::bind_output(Node& node, const at::Tensor& seen) {
  if (!seen.defined()) return node.outputs.push_back(kNoValue);
  const at::Tensor stand_in = tensors_.stand_in_of(seen);
  const LazySigns signs = signs_of(stand_in);
  if (signs.conj || signs.neg) recording_->signs.emplace(recording_->next_value(), signs);
  Value value{.kind = ValueKind::kResult, .spec = spec_of(stand_in), .producer = recording_->next_node()};
  value.output_index = static_cast<int32_t>(node.outputs.size());
  node.outputs.push_back(tensors_.add(std::move(value), seen));
}

void Recorder::hold_written(const OperatorInfo& info, const Node& node, const std::vector<c10::IValue>& arguments) {
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (!info.argument_written[i]) continue;
    // A custom function may leave its own on a view that the body drops at once, which is looked at in the end.
    if (arguments[i].isTensor() && as_ghost(arguments[i].toTensor()) != nullptr) held_.push_back(arguments[i].toTensor());
    if (arguments[i].isTensorList()) check_list_write(info, node.arguments[i], arguments[i]);
  }
}

// The elements of a list are written but not returned, so no new value could say that one requires a gradient now.
void Recorder::check_list_write(const OperatorInfo& info, const Argument& written, const c10::IValue& seen) const {
  const auto& ids = std::get<ValueRefList>(written).ids;
  const auto tensors = seen.toTensorVector();
  for (size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] == kNoValue || recording_->graph.values[ids[k]].spec.requires_grad) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !tensors_.stand_in_of(tensors[k]).requires_grad(), recording_->where(), ": expected ", info.name,
        " to write no gradients into tensors that had none, got a tensor of sizes ", tensors[k].sizes(),
        " that requires a gradient since. Call the operator tensor by tensor, or the form that returns new tensors.");
  }
}

void Recorder::add_backward_root(const at::Tensor& loss, NodeId position) {
  const ValueId root = value_of(loss, "the loss given to backward()");
  TORCH_CHECK_VALUE(
      !recording_->graph.is_backward_root(root),
      "backward: expected another loss in each backward() of a body, got the same one twice. Multiply it by 2 instead.");
  const Value& value = recording_->graph.values[static_cast<size_t>(root)];
  TORCH_CHECK_VALUE(value.kind == ValueKind::kResult, "backward: expected a loss that operators make, got ",
                    value.name.empty() ? "a tensor that comes in" : "'" + value.name + "' of the model itself",
                    ". Give it to backward() by way of an operator, as its sum().");
  rules_.check_backward(root, position);
  recording_->graph.backward_roots.push_back(root);
  rules_.add_backward(position);
  check_no_hooks(run_, recording_->where());
}

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
    const Memories::Memory* memory = written.has_storage() ? memories_.find(written) : nullptr;
    if (memory == nullptr) return;
    for (size_t k = 0; k < graph.read.size(); ++k) {
      if (graph.values[graph.read[k]].storage == memory->id) graph.read[k] = keep_content(graph.read[k]);
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
  return recording_->synthesise("aten::clone", {ValueRef{value}, std::monostate()}, std::move(spec), memories_.new_id(),
                                false);
}

std::optional<ValueRead> Recorder::local_read(const at::Tensor& tensor) const {
  const ValueId id = tensors_.find(tensor);
  const NodeId position = recording_->next_node();
  if (id == kNoValue || !local_slice(recording_->graph, position, {id})) return {};
  ValueRead wanted{.graph = recording_->graph, .num_nodes = position};
  wanted.values = {id};
  wanted.is_local = true;
  for (const ConstantTensor& constant : recording_->constants)
    wanted.constants.push_back({constant.value, constant.content});
  return wanted;
}

ValueId Recorder::value_of(const at::Tensor& tensor, const char* role) {
  TORCH_CHECK_VALUE(tensor.defined(), role, ": expected a defined tensor, got an undefined one.");
  const ValueId id = tensors_.resolve(tensor);
  rules_.check_replaced(role, id, /*is_written=*/false);
  return id;
}

int32_t Recorder::memory_of(const at::Tensor& tensor) const {
  const ValueId id = tensors_.find(tensor);
  return id == kNoValue ? -1 : recording_->graph.values[id].storage;
}

std::shared_ptr<Recording> Recorder::finish(std::vector<ValueId> returned, std::string key) {
  tensors_.close();
  recording_->graph.returned = std::move(returned);
  recording_->graph.key = std::move(key);
  add_marked_regions(*recording_);
  recording_->hash = partitioner::hash(recording_->graph);
  recording_->storages.resize(static_cast<size_t>(memories_.num_ids()));
  return std::move(recording_);
}

}  // namespace smp::runtime
