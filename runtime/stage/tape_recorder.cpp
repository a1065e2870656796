// The recording of tapes.
#include "runtime/stage/tape_recorder.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

#include "partitioner/graph/untaped.h"
#include "runtime/capture/arguments.h"
#include "runtime/capture/operator_info.h"
#include "runtime/capture/places.h"
#include "runtime/device/device.h"
#include "runtime/libtorch/boxed_tensors.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

// Composed of other operators: so the dispatcher sees it unless there is a kernel for the device itself or its autograd.
bool is_composite(const c10::OperatorHandle& op) {
  const Device& device = this_ranks_device();
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(device.backend) && !op.hasKernelForDispatchKey(device.autograd);
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_conj() && !tensor.is_neg();
}

// The attentions of CUDA: the lengths of sequences, which the tape's geometry fixes, beside tensors.
bool returns_sizes(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  if (returns.empty() || !returns.front().type()->isSubtypeOf(*c10::TensorType::get())) return false;
  return std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) || result.real_type()->kind() == c10::TypeKind::SymIntType;
  });
}

std::vector<at::Tensor> tensors_of(const torch::jit::Stack& results) {
  torch::jit::Stack tensors = results;
  std::erase_if(tensors, [](const c10::IValue& result) { return result.isInt(); });
  return flatten_outputs(tensors);
}

// In evaluation a norm only reads its statistics.
bool writes_now(const OperatorInfo& info, const torch::jit::Stack& stack, size_t first, size_t argument) {
  if (!info.argument_written[argument]) return false;
  if (!info.write_is_hidden[argument] || info.training_argument < 0) return true;
  const c10::IValue& trains = stack[first + static_cast<size_t>(info.training_argument)];
  return !trains.isBool() || trains.toBool();
}

// Where the dispatcher goes from autocast on, for a call on dense tensors.
c10::DispatchKeySet keys_below_autocast(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  c10::DispatchKeySet keys;
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) keys = keys | stack[i].toTensor().key_set();
  }
  return keys - c10::autocast_dispatch_keyset - c10::impl::tls_local_dispatch_key_set().excluded_;
}

}  // namespace

TapeRecorder::TapeRecorder(std::vector<TapeOwn> own) {
  for (size_t i = 0; i < own.size(); ++i) own_position_[own[i].value] = i;
  lists_.own = std::move(own);
}

void TapeRecorder::refuse(const std::string& reason) {
  if (refusal_.empty()) refusal_ = reason;
}

int32_t TapeRecorder::add(const at::Tensor& tensor) {
  if (!is_plain(tensor)) {
    refuse("a tensor of layout " + c10::str(tensor.layout()) + ", or one that is lazily conjugated or negated");
    return -1;
  }
  const auto slot = static_cast<int32_t>(lists_.num_slots++);
  lists_.slot_geometries.push_back(geometry_of(tensor));
  tensors_.insert_or_assign(tensor.unsafeGetTensorImpl(), Known{weak(tensor), slot});
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  auto memory = memories_.find(storage);
  if (memory == memories_.end()) {
    memory = memories_.emplace(storage, Memory{tensor.storage().getWeakStorageImpl(), num_memories_++, {}}).first;
  }
  lists_.slot_memories.push_back(memory->second.number);
  memory->second.slots.push_back(slot);
  return slot;
}

int32_t TapeRecorder::known_slot(const at::Tensor& tensor) const {
  const auto known = tensors_.find(tensor.unsafeGetTensorImpl());
  return known == tensors_.end() ? -1 : known->second.slot;
}

// The slot of a tensor that an operator reads, or -1 after a refusal.
int32_t TapeRecorder::slot_of(const at::Tensor& tensor, const std::string& reader) {
  if (const int32_t slot = known_slot(tensor); slot >= 0) return slot;
  if (!is_plain(tensor)) {
    refuse(reader + " reads a tensor of another layout than strided");
    return -1;
  }
  const auto memory = memories_.find(tensor.storage().unsafeGetStorageImpl());
  if (memory == memories_.end()) {
    refuse(reader + " reads a tensor of unknown origin, sizes " + c10::str(tensor.sizes()));
    return -1;
  }
  const TensorSpec geometry = geometry_of(tensor);
  const std::vector<int32_t>& slots = memory->second.slots;
  const auto same = std::find_if(slots.rbegin(), slots.rend(), [&](int32_t slot) {
    return lists_.slot_geometries[static_cast<size_t>(slot)] == geometry;
  });
  if (same != slots.rend()) {
    tensors_.insert_or_assign(tensor.unsafeGetTensorImpl(), Known{weak(tensor), *same});
    return *same;
  }
  const int32_t base = slots.back();
  if (lists_.slot_geometries[static_cast<size_t>(base)].dtype != geometry.dtype) {
    refuse(reader + " reads memory under another dtype than it was written");
    return -1;
  }
  static const auto as_strided = c10::Dispatcher::singleton().findSchemaOrThrow("aten::as_strided", "");
  TapeCall view{{.op = as_strided, .tensors = {{0, base}}}};
  view.kind = TapeCall::Kind::kView;
  view.geometry = geometry;
  view.outputs = {add(tensor)};
  push(std::move(view));
  return lists_.calls.back().outputs.front();
}

void TapeRecorder::entered(ValueId value, const at::Tensor& tensor) {
  const auto own = own_position_.find(value);
  TapeBinding binding{.value = value, .slot = add(tensor), .geometry = geometry_of(tensor)};
  if (own == own_position_.end()) {
    lists_.inputs.push_back(std::move(binding));
  } else {
    static_cast<TapeBinding&>(lists_.own[own->second]) = std::move(binding);
  }
}

void TapeRecorder::call_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack, NodeId node,
                                 int32_t random_ordinal) {
  node_ = node;
  random_ordinal_ = random_ordinal;
  draws_ = draws_of(op, stack);
  lists_.has_random = lists_.has_random || random_ordinal >= 0;
  const size_t first_call = lists_.calls.size();
  {
    const InterceptWithin scope(*this);  // a body that reads a value runs the stage within one of its operators
    op.callBoxed(stack);
  }
  node_by_sequence_.emplace(at::sequence_number::peek(), node);
  random_ordinal_ = -1;
  if (random_ordinal < 0) return;
  // The first of them seeds, each may draw, the last gives the generator free: none of them may leave.
  TapeCall* last = nullptr;
  for (size_t n = first_call; n < lists_.calls.size(); ++n) {
    if (lists_.calls[n].kind != TapeCall::Kind::kOperator) continue;
    last = &lists_.calls[n];
    last->has_effect = true;
  }
  if (last != nullptr) last->ends_random = true;
}

// Autograd's nodes are numbered as they are made, so that a range of numbers belongs to each operator.
NodeId TapeRecorder::node_of_backward() const {
  const auto running = torch::autograd::get_current_node();
  if (!running) return node_;  // a sum of gradients, behind one of them
  const auto made_by = node_by_sequence_.upper_bound(running->sequence_nr());
  return made_by == node_by_sequence_.end() ? node_ : made_by->second;
}

void TapeRecorder::run_backward(const std::function<void()>& engine) {
  if (current_autocast().enabled) refuse("autocast is on where the step is called");
  {
    const InterceptWithin scope(*this);
    engine();
  }
}

void TapeRecorder::operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (!refusal_.empty()) return op.callBoxed(stack);
  if (is_writing_ && c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::AutogradFunctionality)) {
    return op.callBoxed(stack);  // part of the kernel
  }
  if (const std::string why = why_untaped(op.operator_name().name, op.operator_name().overload_name); !why.empty()) {
    refuse(why);
    return op.callBoxed(stack);
  }
  if (op.hasKernelForDispatchKey(this_ranks_device().autocast) &&
      autocast_casts(stack, op.schema().arguments().size(), is_on_host)) {
    const InterceptWithin scope(*this);
    op.callBoxedForDispatchKey(this_ranks_device().autocast, stack);
  } else if (is_composite(op)) {
    const InterceptWithin scope(*this);
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
  } else {
    record(op, stack);
  }
}

void TapeRecorder::record(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OperatorInfo& info = operator_info(op);
  if (info.kind == OperatorClass::kGeometryQuery) return op.callBoxed(stack);
  const OperatorClass kind = class_of_call(info, stack);
  if (kind != OperatorClass::kRecorded && !(kind == OperatorClass::kReadsValue && returns_sizes(op))) {
    refuse(info.name + " reads values, or replaces memory");
  } else if (is_in_backward_ && is_random(op)) {
    refuse(info.name + " draws random numbers in the backward");
  }
  TapeCall made{{.op = op}};
  made.random_ordinal = std::exchange(random_ordinal_, -1);
  made.draws = draws_;
  made.has_effect = is_random(op);
  made.grad_enabled = at::GradMode::is_enabled();
  bool call_writes = false;
  const size_t first = stack.size() - op.schema().arguments().size();
  for (size_t i = 0; refusal_.empty() && first + i < stack.size(); ++i) {
    take_argument(made, static_cast<uint32_t>(i), stack[first + i], info.name);
    if (!writes_now(info, stack, first, i)) continue;
    made.has_effect = call_writes = true;
    for_each_tensor(stack[first + i], [this](int, const at::Tensor& tensor) { note_write(tensor); });
  }
  lists_.changes_geometry_in_place = lists_.changes_geometry_in_place || info.changes_geometry_in_place;
  if (!refusal_.empty()) return op.callBoxed(stack);

  call(op, stack, call_writes);
  const std::vector<at::Tensor> outputs = tensors_of(stack);
  if (record_views(made, outputs)) return;
  for (const at::Tensor& output : outputs) {
    const int32_t known = output.defined() ? known_slot(output) : -1;
    made.outputs.push_back(!output.defined() || known >= 0 ? known : add(output));
  }
  push(std::move(made));
}

// Autograd keeps a copy of what is about to be overwritten, where the backward needs it: an operator like any other, but
// called while this one runs.
void TapeRecorder::call(const c10::OperatorHandle& op, torch::jit::Stack& stack, bool writes) {
  const bool has_autograd =
      op.hasKernelForDispatchKey(c10::DispatchKey::Autograd) || op.hasKernelForDispatchKey(this_ranks_device().autograd);
  const bool is_mutable = op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView);  // not by a hidden write alone
  if (!writes || !has_autograd || !is_mutable || is_in_backward_ || is_writing_) return op.callBoxed(stack);
  const c10::DispatchKeySet keys = keys_below_autocast(op, stack);
  is_writing_ = true;
  try {
    const InterceptWithin scope(*this);
    op.redispatchBoxed(keys, &stack);
  } catch (...) {
    is_writing_ = false;
    throw;
  }
  is_writing_ = false;
}

void TapeRecorder::note_write(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  const auto memory = memories_.find(tensor.storage().unsafeGetStorageImpl());
  if (memory == memories_.end()) return;
  const std::vector<int32_t>& slots = memory->second.slots;
  const auto is_here = [&slots](int32_t slot) { return std::find(slots.begin(), slots.end(), slot) != slots.end(); };
  for (TapeBinding& input : lists_.inputs) input.is_written = input.is_written || is_here(input.slot);
  for (TapeOwn& own : lists_.own) own.is_written = own.is_written || is_here(own.slot);
}

void TapeRecorder::push(TapeCall call) {
  if (is_in_backward_) node_ = node_of_backward();
  call.node = node_;
  lists_.calls.push_back(std::move(call));
}

void TapeRecorder::take_argument(TapeCall& call, uint32_t position, const c10::IValue& value, const std::string& op) {
  call.arguments.emplace_back();
  c10::IValue& own = call.arguments.back();
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    // A number in the form of a tensor comes from a formula, and is the same every time.
    const bool is_number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number() && known_slot(tensor) < 0;
    if (!tensor.defined() || is_number) {
      own = value;
    } else {
      call.tensors.push_back({position, slot_of(tensor, op)});
    }
  } else if (value.isTensorList()) {
    FlatCall::ListArgument list{.position = position, .slots = {}};
    for (const at::Tensor& tensor : value.toTensorVector())
      list.slots.push_back(tensor.defined() ? slot_of(tensor, op) : -1);
    call.lists.push_back(std::move(list));
  } else if (value.isOptionalTensorList()) {
    FlatCall::ListArgument list{.position = position, .slots = {}, .optional_elements = true};
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.slots.push_back(tensor.has_value() && tensor->defined() ? slot_of(*tensor, op) : -1);
    }
    call.lists.push_back(std::move(list));
  } else if (value.isGenerator() || value.isStorage() || value.isStream() || value.isObject() || value.isCapsule()) {
    refuse(op + " has an argument of type " + value.tagKind());
  } else {
    own = value.isList() ? value.deepcopy() : value;
  }
}

// What a view operator makes is described by its geometry, and so made without it.
bool TapeRecorder::record_views(const TapeCall& call, const std::vector<at::Tensor>& outputs) {
  const auto& returns = call.op.schema().returns();
  const bool is_view = returns.size() == 1 && returns[0].alias_info() != nullptr && !returns[0].alias_info()->isWrite() &&
                       call.tensors.size() == 1 && call.lists.empty() && !call.has_effect;
  if (!is_view) return false;
  const int32_t base = call.tensors[0].slot;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !is_plain(output)) return false;
    const auto memory = memories_.find(output.storage().unsafeGetStorageImpl());
    if (memory == memories_.end() ||
        std::find(memory->second.slots.begin(), memory->second.slots.end(), base) == memory->second.slots.end() ||
        lists_.slot_geometries[static_cast<size_t>(base)].dtype != output.scalar_type()) {
      return false;
    }
  }
  for (const at::Tensor& output : outputs) {
    if (known_slot(output) >= 0) continue;
    TapeCall view{{.op = call.op, .tensors = {{0, base}}}};
    view.kind = TapeCall::Kind::kView;
    view.geometry = geometry_of(output);
    view.outputs = {add(output)};
    push(std::move(view));
  }
  random_ordinal_ = call.random_ordinal;  // for the next operator
  return true;
}

bool TapeRecorder::gradient_made(ValueId parameter, const at::Tensor& gradient) {
  if (!refusal_.empty()) return true;
  TapeCall call{{.op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::add_", "Tensor"),
                 .tensors = {{0, slot_of(gradient, "a parameter's gradient")}}}};
  call.kind = TapeCall::Kind::kGradient;
  call.parameter = static_cast<int32_t>(own_position_.at(parameter));
  push(std::move(call));
  return true;
}

void TapeRecorder::end_forward(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (refusal_.empty()) lists_.outputs.push_back(slot_of(output, "the stage's result"));
  }
  lists_.forward_end = lists_.calls.size();
}

void TapeRecorder::begin_backward(const std::vector<at::Tensor>& gradients) {
  is_in_backward_ = true;
  TapeBackward& backward = lists_.backwards.emplace_back();
  for (const at::Tensor& gradient : gradients) {
    backward.has_root.push_back(gradient.defined());
    backward.roots.push_back(gradient.defined() && refusal_.empty() ? add(gradient) : -1);
    backward.root_geometries.push_back(gradient.defined() ? geometry_of(gradient) : TensorSpec{});
  }
}

void TapeRecorder::end_backward(const std::vector<at::Tensor>& results) {
  TapeBackward& backward = lists_.backwards.back();
  for (const at::Tensor& result : results) {
    const bool is_made = result.defined() && refusal_.empty();
    backward.results.push_back(is_made ? slot_of(result, "a gradient that leaves the stage") : -1);
  }
  backward.end = lists_.calls.size();
}

}  // namespace smp::runtime
