// The recording algorithm: one operator call at a time.
#include "runtime/capture/recorder.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "partitioner/graph/graph_io.h"
#include "runtime/capture/arguments.h"
#include "runtime/capture/autocast.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/meta/meta_kernels.h"
#include "runtime/capture/places.h"
#include "runtime/delayed/unmade.h"
#include "runtime/device/random.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

// The stand-in of a parameter, which operators that return their argument (to, contiguous) give back, is none itself.
at::Tensor as_result(const at::Tensor& live) {
  if (!live.defined() || !is_trained(live)) return live;
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  const at::AutoGradMode with_grad(true);
  return live.alias();
}

c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak(const at::Tensor& tensor) {
  return c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr());
}

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

const std::string& module_of(const Recording& recording, const std::string& last) {
  return module_in_texts(recording.graph, static_cast<ValueId>(recording.graph.values.size()), last);
}

}  // namespace

Recorder::Recorder(const Bindings& bindings)
    : bindings_(bindings), recording_(std::make_shared<Recording>()) {
  register_meta_kernels();
}

std::vector<at::Tensor> Recorder::start(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> ghosts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Value value{.kind = ValueKind::kInput, .name = "input." + std::to_string(i), .spec = spec_of(inputs[i])};
    value.spec.requires_grad = false;
    at::Tensor ghost = make_ghost(value.spec, make_ghost_storage(value.spec.num_bytes(), "step argument " + std::to_string(i)), nullptr);
    recording_->graph.inputs.push_back(new_value(std::move(value), ghost, {}));
    held_.push_back(ghost);
    ghosts.push_back(ghost);
  }
  return ghosts;
}

int32_t Recorder::storage_id(const at::Tensor& tensor, ValueId value, bool hold) {
  auto& slot = storages_.try_emplace(storage_of(tensor), StorageInfo{tensor.storage().getWeakStorageImpl(), -1, value, {}})
                   .first->second;
  if (slot.id < 0 || slot.storage.expired()) {
    slot = {tensor.storage().getWeakStorageImpl(), num_storages_++, value, {}};
  }
  if (hold && !slot.first_tensor.defined()) slot.first_tensor = tensor;
  return slot.id;
}

ValueId Recorder::new_value(Value value, const at::Tensor& seen, const at::Tensor& stand_in) {
  const auto id = static_cast<ValueId>(recording_->graph.values.size());
  if (value.storage < 0) value.storage = storage_id(stand_in.defined() ? stand_in : seen, id, false);
  auto known = identities_.find(seen.unsafeGetTensorImpl());
  const bool same = known != identities_.end() && !known->second.impl.expired();
  recording_->same_impl.push_back(same ? recording_->same_impl[known->second.value] : id);
  recording_->graph.values.push_back(std::move(value));
  identities_.insert_or_assign(seen.unsafeGetTensorImpl(), Identity{weak(seen), id, stand_in, history_of(seen)});
  return id;
}

ValueId Recorder::bind_real(const at::Tensor& tensor, const at::Tensor& geometry, Value value, at::Tensor& stand_in) {
  stand_in = make_twin(geometry);
  held_.push_back(tensor);
  held_.push_back(stand_in);
  const auto id = static_cast<ValueId>(recording_->graph.values.size());
  // The twin's storage is another name of the real one.
  value.storage = storage_id(tensor, id, false);
  StorageInfo& real = storages_.at(storage_of(tensor));
  if (!real.first_tensor.defined()) real.first_tensor = stand_in;
  // Constants of one storage are copied one by one, so a view is one of its own constant.
  const bool is_base = value.kind == ValueKind::kConstant;
  storages_.insert_or_assign(storage_of(stand_in), StorageInfo{stand_in.storage().getWeakStorageImpl(), real.id,
                                                               is_base ? id : real.first_value,
                                                               is_base ? stand_in : real.first_tensor});
  return new_value(std::move(value), tensor, stand_in);
}

ValueId Recorder::bind_constant(const at::Tensor& tensor, at::Tensor& stand_in) {
  check_made_here(tensor);
  TORCH_CHECK(!tensor.requires_grad(), where(),
              ": expected trainable tensors to be parameters that the model had when it was wrapped, got a tensor of sizes ",
              tensor.sizes(), " that requires a gradient and is none of them. Call register_parameter and replace_module before "
              "DistributedModel is made, or detach() it outside of the step.");
  TORCH_CHECK_NOT_IMPLEMENTED(can_be_constant(tensor), where(), ": expected tensors made outside of the step to be on the "
                              "CPU and to hold their values, got ", tensor.toString(),
                              tensor.is_conj() || tensor.is_neg() ? " with a lazy sign" : "",
                              ". Give the step cpu(), dequantize(), resolve_conj() or resolve_neg() of it.");
  for (const NamedTensor& named : bindings_.tensors()) {
    const bool is_gradient = named.tensor.grad().defined() && named.tensor.grad().is_alias_of(tensor);
    TORCH_CHECK_VALUE(!is_gradient, where(), ": expected a body that leaves gradients as they are, got one that uses the "
                      "gradient of '", named.name, "'. Backwards run when all bodies have ended, on the rank that holds the "
                      "parameter. Clear gradients before the step, and look at them after it.");
  }
  if (is_unmade(tensor)) {  // a member that is not registered: nobody places it
    const GeneratorHold hold;
    make_values({tensor});
  }
  at::Tensor content = snapshot_of(tensor);
  Value value{.kind = ValueKind::kConstant,
              .name = "constant." + std::to_string(recording_->constants.size()),
              .spec = spec_of(content),
              .is_wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number()};
  ValueId id;
  if (value.is_wrapped_number) {  // stays a CPU scalar: moving it to meta would change type promotion
    held_.push_back(tensor);
    id = new_value(std::move(value), tensor, {});
    stand_in = tensor;
  } else {
    id = bind_real(tensor, content, std::move(value), stand_in);
  }
  recording_->constants.push_back({id, tensor, std::move(content)});
  return id;
}

ValueId Recorder::resolve(at::Tensor& tensor) {
  auto known = identities_.find(tensor.unsafeGetTensorImpl());
  if (known != identities_.end() && !known->second.impl.expired()) {
    check_as_before(tensor, known->second);
    if (known->second.stand_in.defined()) tensor = known->second.stand_in;
    return known->second.value;
  }
  at::Tensor stand_in;
  ValueId id = kNoValue;
  if (const NamedTensor* named = bindings_.find(tensor)) {
    check_made_here(tensor);
    id = bind_real(tensor, tensor, {.kind = named->kind, .name = named->name, .spec = spec_of(tensor)}, stand_in);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.has_storage(), where(), ": expected dense tensors, got a sparse or opaque one. ",
                                "Give the step to_dense() of it, or replace it by an index operator (index_select, ",
                                "index_add).");
    if (const NamedTensor* base = bindings_.find_storage(tensor)) {
      at::Tensor of_base = base->tensor;
      resolve(of_base);
    }
    auto storage = storages_.find(storage_of(tensor));
    const bool is_known = storage != storages_.end() && !storage->second.storage.expired();
    const bool is_constant =
        is_known && !tensor.is_meta() &&
        recording_->graph.values[storage->second.first_value].kind == ValueKind::kConstant;
    if (is_known && !is_constant && take_copy(tensor, storage->second.first_value, stand_in)) {
      id = identities_.at(tensor.unsafeGetTensorImpl()).value;
    } else if (is_known && !is_constant) {
      id = alias_of(StorageInfo(storage->second), tensor, stand_in);
    } else {
      if (tensor.is_meta()) refuse_stale_ghost("capture", module_of(*recording_, last_module_));
      id = bind_constant(tensor, stand_in);
    }
  }
  if (stand_in.defined()) tensor = stand_in;
  return id;
}

// A copy made behind the dispatcher (tensor.data(), make_variable): a new TensorImpl on a known storage.
ValueId Recorder::alias_of(const StorageInfo& storage, const at::Tensor& tensor, at::Tensor& stand_in) {
  TORCH_CHECK(tensor.grad_fn() == nullptr, where(),
              ": expected operators only, got a tensor with a gradient function that no operator made (a custom "
              "autograd function returns such tensors). Its backward would be lost: write the function with "
              "differentiable operators, or call it through smp::opaque.");
  const Value base = recording_->graph.values[storage.first_value];
  const bool grad_enabled = at::GradMode::is_enabled();
  const TensorSpec spec = spec_of(tensor);
  const ValueId detached = synthesise("aten::detach", {ValueRef{storage.first_value}}, base.spec, storage.id, grad_enabled);
  const ValueId id = synthesise("aten::as_strided",
                                {ValueRef{detached}, spec.sizes, spec.strides, Argument(spec.storage_offset)}, spec,
                                storage.id, grad_enabled);
  if (storage.first_tensor.defined()) {
    stand_in = at::as_strided(storage.first_tensor.detach(), spec.sizes, spec.strides, spec.storage_offset);
    held_.push_back(tensor);
  }
  identities_.insert_or_assign(tensor.unsafeGetTensorImpl(), Identity{weak(tensor), id, stand_in, history_of(tensor)});
  return id;
}

void Recorder::check_as_before(const at::Tensor& tensor, const Identity& known) const {
  const ValueId id = known.value;
  const Value& value = recording_->graph.values[id];
  check_history(tensor, known);
  if (value.kind == ValueKind::kParameter) check_not_frozen(tensor, value);
  if (value.kind != ValueKind::kConstant || owns_memory(tensor)) return;
  // It may be gone when the body has ended, so it is looked at now.
  for (const ConstantTensor& constant : recording_->constants) {
    if (constant.value == id) check_unchanged(constant, where());
  }
}

void Recorder::check_not_frozen(const at::Tensor& tensor, const Value& value) const {
  TORCH_CHECK(tensor.requires_grad() == value.spec.requires_grad, where(), ": expected '", value.name,
              "' to keep requires_grad=", value.spec.requires_grad ? "true" : "false",
              " while the body runs, got a change to ", tensor.requires_grad() ? "true" : "false",
              ". The stages run the operators after the body, and on other ranks. Set it outside of the step, on every "
              "rank, or use parameter.detach() in the body.");
}

void Recorder::refuse_unsupported(const OperatorInfo& info, const torch::jit::Stack& stack) const {
  switch (class_of_call(info, stack)) {
    case OperatorClass::kReadsValue:
      refuse_value_read(info.name, module_of(*recording_, last_module_));
    case OperatorClass::kDataDependentShape:
      refuse_data_dependent_shape(info.name, module_of(*recording_, last_module_));
    case OperatorClass::kReplacesData:
      refuse_replaced_data(info.name, module_of(*recording_, last_module_));
    case OperatorClass::kRunsBackward:
      refuse_backward();
    default:
      break;
  }
}

void Recorder::operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OperatorInfo& info = operator_info(op);
  refuse_unsupported(info, stack);
  keep_before_write(info, stack);
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  const std::vector<c10::IValue> originals(stack.begin() + static_cast<ptrdiff_t>(first), stack.end());
  Node node{.op = info.name, .overload = info.overload, .grad_enabled = at::GradMode::is_enabled()};
  node.autocast = current_autocast();
  GhostAccess access;  // LibTorch's overlap checks read addresses
  const TensorToValue to_value = [&](at::Tensor& tensor) {
    const ValueId id = resolve(tensor);
    access.allow(tensor);
    return id;
  };
  for (size_t i = first; i < stack.size(); ++i) {
    node.arguments.push_back(to_argument(stack[i], to_value, info.name));
  }
  note_module(node);
  check_initialised(info, node);
  const bool has_tensors = !node_inputs(node).empty();
  for (size_t i = 0; i < info.argument_is_device.size(); ++i) {
    c10::IValue& argument = stack[first + i];
    if (info.argument_is_device[i] && (argument.isDevice() || !has_tensors)) argument = c10::Device(c10::kMeta);
  }
  if (info.is_random) node.random_ordinal = num_random_++;
  try {
    call_on_ghosts(op, stack);
  } catch (c10::NotImplementedError& error) {
    error.add_context("while capturing " + describe_place(info.name, module_of(*recording_, last_module_)) +
                      ". What looks at data within may run by its own code: call it through smp::opaque");
    throw;
  } catch (c10::Error& error) {
    error.add_context("while capturing " + describe_place(info.name, module_of(*recording_, last_module_)));
    throw;
  }
  const bool returns_list = info.returned_argument.size() == 1 && stack.back().isTensorList();
  bind_outputs(info, node, originals, stack);
  note_histories(node);
  recording_->graph.nodes.push_back(std::move(node));
  const bool fixes_scalars = returns_argument(op, recording_->graph);
  recording_->calls.push_back(
      {.op = op, .info = &info, .returns_list = returns_list, .fixes_scalars = fixes_scalars});
}

void Recorder::note_module(Node& node) {
  for (ValueId id : node_inputs(node)) {
    const Value& value = recording_->graph.values[id];
    if (value.kind != ValueKind::kParameter && value.kind != ValueKind::kBuffer) continue;
    const size_t dot = value.name.rfind('.');
    last_module_ = dot == std::string::npos ? "" : value.name.substr(0, dot);
  }
  node.module = last_module_;
}

void Recorder::bind_outputs(const OperatorInfo& info, Node& node, const std::vector<c10::IValue>& originals,
                            torch::jit::Stack& stack) {
  note_writes(info, node, originals);
  const size_t num_returns = info.returned_argument.size();
  const size_t first = stack.size() - num_returns;
  int32_t index = 0;
  for (size_t i = 0; i < num_returns; ++i) {
    c10::IValue& result = stack[first + i];
    if (result.isTensor()) {
      const int argument = info.returned_argument[i];
      const at::Tensor live = argument >= 0 ? result.toTensor() : as_result(result.toTensor());
      result = argument >= 0 ? originals[static_cast<size_t>(argument)] : c10::IValue(live);
      node.outputs.push_back(live.defined() ? bind_output(node, index, live, result.toTensor()) : kNoValue);
      ++index;
    } else if (result.isTensorList()) {
      for (const at::Tensor& live : result.toTensorVector()) {
        node.outputs.push_back(live.defined() ? bind_output(node, index, live, live) : kNoValue);
        ++index;
      }
    }
  }
  if (!info.makes_uninitialised) return;
  for (ValueId id : node.outputs) {
    if (id != kNoValue) uninitialised_.insert(recording_->graph.values[id].storage);
  }
}

ValueId Recorder::bind_output(const Node& node, int32_t index, const at::Tensor& live, const at::Tensor& seen) {
  const auto node_id = static_cast<NodeId>(recording_->graph.nodes.size());
  Value value{.kind = ValueKind::kResult, .spec = spec_of(live), .producer = node_id, .output_index = index};
  const bool is_seen = live.is_same(seen);
  if (is_seen) {
    mark_as_ghost(live, describe_place("the result of " + node.op, module_of(*recording_, node.module)));
  } else if (seen.is_meta()) {  // the ghost of an earlier run, that the body sees in place of `live`
    set_geometry(seen, value.spec);
    set_gradient(seen, value.spec.requires_grad, ghost_grad_fn_);
  }
  value.storage = storage_id(live, static_cast<ValueId>(recording_->graph.values.size()), false);
  return new_value(std::move(value), seen, is_seen ? at::Tensor() : live);
}

void Recorder::add_backward_root(const at::Tensor& loss, NodeId position) {
  const ValueId root = value_of(loss, "the loss given to backward()");
  TORCH_CHECK_VALUE(!recording_->graph.is_backward_root(root),
                    "backward: expected another loss in each backward() of a body, got the same one twice. Multiply it "
                    "by 2 instead.");
  const Value& value = recording_->graph.values[static_cast<size_t>(root)];
  TORCH_CHECK_VALUE(value.kind == ValueKind::kResult, "backward: expected a loss that operators make, got ",
                    value.name.empty() ? "a tensor that comes in" : "'" + value.name + "' of the model itself",
                    ". Give it to backward() by way of an operator, as its sum().");
  check_hidden_writes(root, position);
  recording_->graph.backward_roots.push_back(root);
  backward_positions_.push_back(position);
  at::Tensor live = loss;
  resolve(live);
  refuse_hooks(live.grad_fn().get(), where());
}

ValueId Recorder::value_of(const at::Tensor& tensor, const char* role) {
  TORCH_CHECK_VALUE(tensor.defined(), role, ": expected a defined tensor, got an undefined one.");
  at::Tensor copy = tensor;
  return resolve(copy);
}

int32_t Recorder::memory_of(const at::Tensor& tensor) const {
  const auto known = identities_.find(tensor.unsafeGetTensorImpl());
  return known == identities_.end() ? -1 : recording_->graph.values[static_cast<size_t>(known->second.value)].storage;
}

std::string Recorder::where() const { return describe_place("capture", module_of(*recording_, last_module_)); }

std::shared_ptr<Recording> Recorder::finish(std::vector<ValueId> returned, std::string key) {
  Recording& recording = *recording_;
  check_histories();
  for (const ConstantTensor& constant : recording.constants) {
    if (owns_memory(constant.tensor)) check_unchanged(constant, where());
  }
  recording.graph.returned = std::move(returned);
  recording.graph.key = std::move(key);
  recording.hash = partitioner::hash(recording.graph);
  note_changes(recording);
  recording.tensors.resize(recording.graph.values.size());
  for (auto& [impl, identity] : identities_) {
    const ValueId first = recording.same_impl[identity.value];
    const ValueKind kind = recording.graph.values[first].kind;
    if (kind == ValueKind::kResult || kind == ValueKind::kInput) continue;
    auto alive = identity.impl.lock();
    if (!alive) continue;
    recording.tensors[first] = at::Tensor(std::move(alive));
    if (kind == ValueKind::kParameter) check_not_frozen(recording.tensors[first], recording.graph.values[first]);
  }
  make_ghosts(recording);
  return std::move(recording_);
}

}  // namespace smp::runtime
