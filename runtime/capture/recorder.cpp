// The recording algorithm: one operator call at a time.
#include "runtime/capture/recorder.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>

#include "partitioner/graph/graph_io.h"
#include "runtime/capture/arguments.h"
#include "runtime/capture/devices.h"
#include "runtime/capture/places.h"
#include "runtime/device/random.h"
#include "runtime/libtorch/unmade.h"

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

const std::string& module_of(const Recording& recording, const std::string& last) {
  return module_in_texts(recording.graph, static_cast<ValueId>(recording.graph.values.size()), last);
}

}  // namespace

Recorder::Recorder(const Bindings& bindings, GhostRun run)
    : bindings_(bindings),
      run_(std::move(run)),
      calls_(
          run_, [this](const at::Tensor& seen) { return stand_in_of(seen); },
          [this](const at::Tensor& stand_in) { return ghost_of(stand_in); },
          [this](const at::Tensor& seen) {
            return !is_on_this_ranks_device(seen) && bindings_.find_storage(seen) != nullptr;
          }),
      recording_(std::make_shared<Recording>()),
      rules_(*recording_, [this] { return where(); }) {}

std::vector<at::Tensor> Recorder::start(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> ghosts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Value value{.kind = ValueKind::kInput, .name = "input." + std::to_string(i), .spec = spec_of(inputs[i])};
    value.spec.requires_grad = false;
    ghosts.push_back(ghost_of_input(value.spec, i));
    recording_->graph.inputs.push_back(new_value(std::move(value), ghosts.back()));
  }
  return ghosts;
}

at::Tensor Recorder::ghost_of_input(const TensorSpec& spec, size_t position) {
  maker_ = "step argument " + std::to_string(position);
  makes_on_ = &this_ranks_device();
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  at::Tensor stand_in = at::empty_strided(spec.sizes, spec.strides, at::TensorOptions(at::kMeta).dtype(spec.dtype));
  if (spec.storage_offset != 0) stand_in.unsafeGetTensorImpl()->set_storage_offset(spec.storage_offset);
  return ghost_of(stand_in);
}

ValueId Recorder::new_value(Value value, const at::Tensor& seen) {
  const auto id = static_cast<ValueId>(recording_->graph.values.size());
  if (value.storage < 0) value.storage = storage_id(stand_in_of(seen), id);
  const Ghost* ghost = as_ghost(seen);
  const auto known = identities_.find(seen.unsafeGetTensorImpl());
  const ValueId before = ghost != nullptr ? ghost->value : known != identities_.end() ? known->second.value : kNoValue;
  recording_->same_impl.push_back(before == kNoValue ? id : recording_->same_impl[before]);
  recording_->graph.values.push_back(std::move(value));
  take_value(id, seen);
  return id;
}

// From now on `seen`, a ghost or a real tensor known already, has the value `id`.
void Recorder::take_value(ValueId id, const at::Tensor& seen) {
  Ghost* ghost = as_ghost(seen);
  if (ghost == nullptr) {
    identities_.at(seen.unsafeGetTensorImpl()).value = id;
    return;
  }
  ghost->value = id;
  const auto first = static_cast<size_t>(recording_->same_impl[id]);
  if (ghosts_.size() <= first) ghosts_.resize(first + 1, weak(at::Tensor()));
  ghosts_[first] = weak(seen);
}

// `geometry` is the tensor itself, or the dense copy of a constant.
void Recorder::take_real(ValueId id, const at::Tensor& tensor, const at::Tensor& geometry) {
  const Value& value = recording_->graph.values[id];
  // A wrapped number stays a CPU scalar: moving it to meta would change type promotion.
  const at::Tensor stand_in = value.is_wrapped_number ? tensor : make_twin(geometry);
  identities_.insert_or_assign(tensor.unsafeGetTensorImpl(), Identity{id, tensor, stand_in, history_of(tensor)});
  if (value.is_wrapped_number) return;
  StorageInfo& real = storage_info(tensor);
  if (!real.first_tensor.defined()) real.first_tensor = stand_in;
  if (real.id < 0) name_storage(real, value.storage, id);
  // Constants of one storage are copied one by one, so a view is one of its own constant.
  const bool is_base = value.kind == ValueKind::kConstant;
  StorageInfo& twin = storage_info(stand_in);
  twin.first_tensor = is_base ? stand_in : real.first_tensor;
  twin.device = value.kind == ValueKind::kConstant && is_on_host(tensor) ? &host() : &this_ranks_device();
  name_storage(twin, real.id, is_base ? id : real.first_value);
}

ValueId Recorder::bind_real(const at::Tensor& tensor, const at::Tensor& geometry, Value value) {
  const auto id = static_cast<ValueId>(recording_->graph.values.size());
  value.storage = storage_id(tensor, id);
  recording_->same_impl.push_back(id);
  recording_->graph.values.push_back(std::move(value));
  take_real(id, tensor, geometry);
  return id;
}

ValueId Recorder::bind_constant(const at::Tensor& tensor) {
  check_made_here(tensor);
  TORCH_CHECK(!tensor.requires_grad(), where(),
              ": expected trainable tensors to be parameters that the model had when it was wrapped, got a tensor of sizes ",
              tensor.sizes(),
              " that requires a gradient and is none of them. Call register_parameter and replace_module before "
              "DistributedModel is made, or detach() it outside of the step.");
  TORCH_CHECK_NOT_IMPLEMENTED(can_be_constant(tensor), where(),
                              ": expected tensors made outside of the step to be on the CPU and to hold their values, got ",
                              tensor.toString(), tensor.is_conj() || tensor.is_neg() ? " with a lazy sign" : "",
                              ". Give the step cpu(), dequantize(), resolve_conj() or resolve_neg() of it.");
  for (const NamedTensor& named : bindings_.tensors()) {
    const at::Tensor& grad = named.tensor.grad();
    const bool is_gradient = grad.defined() && grad.has_storage() && grad.is_alias_of(tensor);
    TORCH_CHECK_VALUE(!is_gradient, where(),
                      ": expected a body that leaves gradients as they are, got one that uses the gradient of '", named.name,
                      "'. Backwards run when all bodies have ended, on the rank that holds the parameter. Clear gradients "
                      "before the step, and look at them after it.");
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
  const ValueId id = bind_real(tensor, content, std::move(value));
  recording_->constants.push_back({id, tensor, std::move(content)});
  return id;
}

ValueId Recorder::resolve(const at::Tensor& tensor) {
  if (const Ghost* ghost = as_ghost(tensor)) return resolve_ghost(tensor, *ghost);
  const auto known = identities_.find(tensor.unsafeGetTensorImpl());
  if (known != identities_.end()) {
    check_as_before(tensor, known->second);
    return known->second.value;
  }
  if (const NamedTensor* named = bindings_.find(tensor)) {
    check_made_here(tensor);
    return bind_real(tensor, tensor, {.kind = named->kind, .name = named->name, .spec = spec_of(tensor)});
  }
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.has_storage(), where(), ": expected dense tensors, got a sparse or opaque one. ",
                              "Give the step to_dense() of it, or replace it by an index operator (index_select, ",
                              "index_add).");
  if (const NamedTensor* base = bindings_.find_storage(tensor)) resolve(base->tensor);
  const StorageInfo* storage = find_storage(tensor);
  const bool is_constant = storage == nullptr || recording_->graph.values[storage->first_value].kind == ValueKind::kConstant;
  return is_constant ? bind_constant(tensor) : alias_of(*storage, tensor);
}

ValueId Recorder::resolve_ghost(const at::Tensor& tensor, const Ghost& ghost) {
  if (ghost.run != run_.number) refuse_stale_ghost("capture", module_of(*recording_, last_module_));
  if (!is_as_handed_out(tensor)) refuse_history(tensor, where());
  if (ghost.value != kNoValue) return ghost.value;
  const StorageInfo* storage = find_storage(tensor);
  TORCH_INTERNAL_ASSERT(storage != nullptr, "a ghost on memory of no value: ", maker_);
  return alias_of(*storage, tensor);
}

// A copy made behind the dispatcher (tensor.data(), make_variable): a new TensorImpl on a known storage.
ValueId Recorder::alias_of(const StorageInfo& storage, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.grad_fn() == nullptr, where(),
              ": expected operators only, got a tensor with a gradient function that no operator made (a custom autograd "
              "function returns such tensors). Its backward would be lost: write the function with differentiable "
              "operators, or call it through smp::opaque.");
  const Value base = recording_->graph.values[storage.first_value];
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.scalar_type() == base.spec.dtype && !tensor.is_conj() && !tensor.is_neg(), where(),
                              ": expected data() and the like of tensors that read their memory as it was made, got one of ",
                              tensor.scalar_type(), " on memory of ", base.spec.dtype,
                              tensor.is_conj() || tensor.is_neg() ? ", with a lazy sign" : "",
                              ". Call detach() in place of data(), or clone() the view first.");
  const bool grad_enabled = at::GradMode::is_enabled();
  const TensorSpec spec = spec_of(tensor);
  const ValueId detached = synthesise("aten::detach", {ValueRef{storage.first_value}}, base.spec, storage.id, grad_enabled);
  const ValueId id =
      synthesise("aten::as_strided", {ValueRef{detached}, spec.sizes, spec.strides, Argument(spec.storage_offset)}, spec,
                 storage.id, grad_enabled);
  Ghost* ghost = as_ghost(tensor);
  at::Tensor stand_in = ghost != nullptr ? ghost->stand_in : at::Tensor();
  if (!stand_in.defined()) {
    stand_in = at::as_strided(storage.first_tensor.detach(), spec.sizes, spec.strides, spec.storage_offset);
  }
  if (ghost != nullptr) {
    ghost->stand_in = stand_in;
  } else {
    identities_.emplace(tensor.unsafeGetTensorImpl(), Identity{id, tensor, stand_in, history_of(tensor)});
  }
  take_value(id, tensor);
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
  if (tensor.requires_grad() != value.spec.requires_grad) refuse_freezing(value.name, tensor.requires_grad(), where());
}

void Recorder::refuse_unsupported(const OperatorInfo& info, const torch::jit::Stack& stack) const {
  const auto* arguments = &stack.end()[-info.num_arguments];
  for (size_t i = 0; i < info.argument_is_device.size(); ++i) {
    const bool is_meta = info.argument_is_device[i] && arguments[i].isDevice() && arguments[i].toDevice().is_meta();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_meta, describe_place(info.name, module_of(*recording_, last_module_)),
        ": expected tensors of the rank's device, got the meta device, whose tensors have no data to ",
        "compute with or to send. Ask the tensors themselves for sizes and dtypes.");
  }
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
  for (const c10::IValue& argument : originals) {
    node.arguments.push_back(to_argument(argument, [this](const at::Tensor& tensor) { return resolve(tensor); }, info.name));
  }
  note_module(node);
  rules_.check_reads(info, node);
  if (info.is_random) node.random_ordinal = num_random_++;
  const std::string place = describe_place(info.name, module_of(*recording_, last_module_));
  maker_ = "the result of " + place;
  makes_on_ = &device_of_results(info, stack, bindings_);
  try {
    calls_.operator_called(op, stack);
  } catch (c10::NotImplementedError& error) {
    error.add_context("while capturing " + place +
                      ". What looks at data within may run by its own code: call it through smp::opaque");
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
  RecordedCall call{.op = op, .info = &info, .returns_list = returns_list};
  call.gradients = follow_writes(node);
  recording_->graph.nodes.push_back(std::move(node));
  call.fixes_scalars = returns_argument(op, recording_->graph);
  recording_->calls.push_back(std::move(call));
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

void Recorder::bind_output(Node& node, const at::Tensor& seen) {
  const auto index = static_cast<int32_t>(node.outputs.size());
  if (!seen.defined()) {
    node.outputs.push_back(kNoValue);
    return;
  }
  const auto producer = static_cast<NodeId>(recording_->graph.nodes.size());
  const LazySigns signs = signs_of(stand_in_of(seen));
  if (signs.conj || signs.neg) recording_->signs.emplace(static_cast<ValueId>(recording_->graph.values.size()), signs);
  node.outputs.push_back(new_value(
      {.kind = ValueKind::kResult, .spec = spec_of(stand_in_of(seen)), .producer = producer, .output_index = index}, seen));
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
  check_no_hooks(run_, where());
}

ValueId Recorder::value_of(const at::Tensor& tensor, const char* role) {
  TORCH_CHECK_VALUE(tensor.defined(), role, ": expected a defined tensor, got an undefined one.");
  return resolve(tensor);
}

int32_t Recorder::memory_of(const at::Tensor& tensor) const {
  const Ghost* ghost = as_ghost(tensor);
  const auto known = identities_.find(tensor.unsafeGetTensorImpl());
  const ValueId id = ghost != nullptr ? ghost->value : known != identities_.end() ? known->second.value : kNoValue;
  return id == kNoValue ? -1 : recording_->graph.values[id].storage;
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
  recording.storages.resize(static_cast<size_t>(num_storages_));
  recording.tensors.resize(recording.graph.values.size());
  for (const auto& [impl, identity] : identities_) {
    const ValueId first = recording.same_impl[identity.value];
    const Value& value = recording.graph.values[first];
    if (!is_named(value)) continue;
    recording.tensors[first] = identity.tensor;
    if (value.kind == ValueKind::kParameter) check_not_frozen(identity.tensor, value);
  }
  return std::move(recording_);
}

}  // namespace smp::runtime
