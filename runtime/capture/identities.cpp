// Tensors by TensorImpl, then by storage; those that are new become values here.
#include "runtime/capture/identities.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/capture/interceptor.h"
#include "runtime/capture/places.h"
#include "runtime/device/random.h"
#include "runtime/libtorch/unmade.h"

namespace smp::runtime {

using namespace partitioner;

ValueId Identities::resolve(const at::Tensor& tensor) {
  if (const Ghost* ghost = as_ghost(tensor)) return resolve_ghost(tensor, *ghost);
  const auto known = by_impl_.find(tensor.unsafeGetTensorImpl());
  if (known != by_impl_.end()) {
    check_as_before(tensor, known->second);
    return known->second.value;
  }
  if (const NamedTensor* named = bindings_.find(tensor)) {
    check_made_here(tensor);
    return bind_real(tensor, tensor, {.kind = named->kind, .name = named->name, .spec = spec_of(tensor)});
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.has_storage(), recording_.where(), ": expected dense tensors, got a sparse or opaque one. ",
      "Give the step to_dense() of it, or replace it by an index operator (index_select, ", "index_add).");
  if (const NamedTensor* base = bindings_.find_storage(tensor)) resolve(base->tensor);
  const Memories::Memory* memory = memories_.find(tensor);
  const bool is_constant = memory == nullptr || recording_.graph.values[memory->first_value].kind == ValueKind::kConstant;
  return is_constant ? bind_constant(tensor) : alias_of(*memory, tensor);
}

ValueId Identities::resolve_ghost(const at::Tensor& tensor, const Ghost& ghost) {
  if (ghost.run != run_.number) refuse_stale_ghost("capture", recording_.module());
  if (!is_as_handed_out(tensor)) refuse_history(tensor, recording_.where());
  if (ghost.value != kNoValue) return ghost.value;
  const Memories::Memory* memory = memories_.find(tensor);
  TORCH_INTERNAL_ASSERT(memory != nullptr, "a ghost on memory of no value: ", memories_.maker());
  return alias_of(*memory, tensor);
}

ValueId Identities::find(const at::Tensor& tensor) const {
  if (const Ghost* ghost = as_ghost(tensor)) return ghost->value;
  const auto known = by_impl_.find(tensor.unsafeGetTensorImpl());
  return known == by_impl_.end() ? kNoValue : known->second.value;
}

ValueId Identities::add(Value value, const at::Tensor& seen) {
  value.storage = memories_.id_of(stand_in_of(seen), recording_.next_value());
  const ValueId id = recording_.add_value(std::move(value), find(seen));
  take(id, seen);
  return id;
}

void Identities::take(ValueId id, const at::Tensor& seen) {
  Ghost* ghost = as_ghost(seen);
  if (ghost == nullptr) {
    by_impl_.at(seen.unsafeGetTensorImpl()).value = id;
    return;
  }
  ghost->value = id;
  const auto first = static_cast<size_t>(recording_.same_impl[id]);
  if (ghosts_.size() <= first) ghosts_.resize(first + 1, weak(at::Tensor()));
  ghosts_[first] = weak(seen);
}

void Identities::take_real(ValueId id, const at::Tensor& tensor, const at::Tensor& geometry) {
  const Value& value = recording_.graph.values[id];
  // A wrapped number stays a CPU scalar: moving it to meta would change type promotion.
  const at::Tensor stand_in = value.is_wrapped_number ? tensor : make_twin(geometry);
  by_impl_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                            Identity{id, tensor, stand_in, history_of(tensor), is_trained(tensor)});
  if (value.is_wrapped_number) return;
  Memories::Memory& real = memories_.of(tensor);
  if (!real.first_tensor.defined()) real.first_tensor = stand_in;
  if (real.id < 0) memories_.name(real, value.storage, id);
  // Constants of one storage are copied one by one, so a view is one of its own constant.
  const bool is_base = value.kind == ValueKind::kConstant;
  Memories::Memory& twin = memories_.of(stand_in);
  twin.first_tensor = is_base ? stand_in : real.first_tensor;
  twin.device = is_base && is_on_host(tensor) ? &host() : &this_ranks_device();
  memories_.name(twin, real.id, is_base ? id : real.first_value);
}

// Its memory stays, so that copies which the body has made behind the dispatcher find it.
void Identities::adopt(ValueId id, const at::Tensor& made) {
  if (as_ghost(made) != nullptr) {
    Memories::Memory& memory = memories_.of(stand_in_of(made));
    if (memory.id < 0) {
      memory.first_tensor = stand_in_of(made);
      memories_.name(memory, recording_.graph.values[id].storage, id);
    }
  }
  take(id, made);
}

ValueId Identities::bind_real(const at::Tensor& tensor, const at::Tensor& geometry, Value value) {
  value.storage = memories_.id_of(tensor, recording_.next_value());
  const ValueId id = recording_.add_value(std::move(value));
  take_real(id, tensor, geometry);
  return id;
}

ValueId Identities::bind_constant(const at::Tensor& tensor) {
  check_untrained(tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(can_be_constant(tensor), recording_.where(),
                              ": expected tensors made outside of the step to be on the CPU and to hold their values, got ",
                              tensor.toString(), tensor.is_conj() || tensor.is_neg() ? " with a lazy sign" : "",
                              ". Give the step cpu(), dequantize(), resolve_conj() or resolve_neg() of it.");
  for (const NamedTensor& named : bindings_.tensors()) {
    const at::Tensor& grad = named.tensor.grad();
    const bool is_gradient = grad.defined() && grad.has_storage() && grad.is_alias_of(tensor);
    TORCH_CHECK_VALUE(!is_gradient, recording_.where(),
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
              .name = "constant." + std::to_string(recording_.constants.size()),
              .spec = spec_of(content),
              .is_wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number()};
  const ValueId id = bind_real(tensor, content, std::move(value));
  recording_.constants.push_back({id, tensor, std::move(content), tensor.requires_grad()});
  return id;
}

// A copy made behind the dispatcher (tensor.data(), make_variable): a new TensorImpl on a known storage.
ValueId Identities::alias_of(const Memories::Memory& memory, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.grad_fn() == nullptr, recording_.where(),
              ": expected operators only, got a tensor with a gradient function that no operator made (a custom autograd "
              "function returns such tensors). Its backward would be lost: write the function with differentiable "
              "operators, or call it through smp::opaque.");
  const Value base = recording_.graph.values[memory.first_value];
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.scalar_type() == base.spec.dtype && !tensor.is_conj() && !tensor.is_neg(), recording_.where(),
      ": expected data() and the like of tensors that read their memory as it was made, got one of ", tensor.scalar_type(),
      " on memory of ", base.spec.dtype, tensor.is_conj() || tensor.is_neg() ? ", with a lazy sign" : "",
      ". Call detach() in place of data(), or clone() the view first.");
  const bool grad_enabled = at::GradMode::is_enabled();
  const TensorSpec spec = spec_of(tensor);
  const ValueId detached =
      recording_.synthesise("aten::detach", {ValueRef{memory.first_value}}, base.spec, memory.id, grad_enabled);
  const ValueId id = recording_.synthesise("aten::as_strided",
                                           {ValueRef{detached}, spec.sizes, spec.strides, Argument(spec.storage_offset)},
                                           spec, memory.id, grad_enabled);
  Ghost* ghost = as_ghost(tensor);
  at::Tensor stand_in = ghost != nullptr ? ghost->stand_in : at::Tensor();
  if (!stand_in.defined()) {
    stand_in = at::as_strided(memory.first_tensor.detach(), spec.sizes, spec.strides, spec.storage_offset);
  }
  if (ghost != nullptr) {
    ghost->stand_in = stand_in;
  } else {
    by_impl_.emplace(tensor.unsafeGetTensorImpl(), Identity{id, tensor, stand_in, history_of(tensor), is_trained(tensor)});
  }
  take(id, tensor);
  return id;
}

// Other real tensors than those of the body's operators are made within a composite.
at::Tensor Identities::stand_in_of(const at::Tensor& tensor) const {
  if (const Ghost* ghost = as_ghost(tensor)) return ghost->stand_in;
  const auto known = by_impl_.find(tensor.unsafeGetTensorImpl());
  if (known != by_impl_.end()) return known->second.stand_in;
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : make_twin(tensor);
}

at::Tensor Identities::ghost_of(const at::Tensor& stand_in) {
  at::Tensor ghost = make_ghost(spec_of(stand_in), memories_.ghosts_of(stand_in), run_, kNoValue);
  as_ghost(ghost)->stand_in = stand_in;
  set_signs(ghost, signs_of(stand_in));
  return ghost;
}

at::Tensor Identities::ghost_of_input(const TensorSpec& spec, size_t position) {
  memories_.set_maker("step argument " + std::to_string(position));
  memories_.set_device(this_ranks_device());
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  at::Tensor stand_in = at::empty_strided(spec.sizes, spec.strides, at::TensorOptions(at::kMeta).dtype(spec.dtype));
  if (spec.storage_offset != 0) stand_in.unsafeGetTensorImpl()->set_storage_offset(spec.storage_offset);
  return ghost_of(stand_in);
}

std::vector<GradientChange> Identities::follow_writes(const std::vector<int32_t>& written) {
  std::vector<GradientChange> changes;
  for (size_t first = 0; first < ghosts_.size() && !written.empty(); ++first) {
    const int32_t storage = recording_.graph.values[first].storage;
    if (std::find(written.begin(), written.end(), storage) == written.end()) continue;
    const at::Tensor ghost = lock(ghosts_[first]);
    if (!ghost.defined()) continue;
    const bool requires_grad = as_ghost(ghost)->stand_in.requires_grad();
    if (ghost.requires_grad() == requires_grad) continue;
    if (!is_as_handed_out(ghost)) refuse_history(ghost, recording_.where());
    set_gradient(ghost, requires_grad, run_);
    changes.push_back({static_cast<ValueId>(first), requires_grad});
  }
  return changes;
}

void Identities::close() {
  for (const auto& [impl, known] : by_impl_) check_history(known.tensor, known);
  for (const WeakTensor& each : ghosts_) {
    const at::Tensor ghost = lock(each);
    if (ghost.defined() && !is_as_handed_out(ghost)) refuse_history(ghost, recording_.where());
  }
  for (const ConstantTensor& constant : recording_.constants) {
    if (owns_memory(constant.tensor)) check_unchanged(constant, recording_.where());
  }
  recording_.tensors.resize(recording_.graph.values.size());
  for (const auto& [impl, known] : by_impl_) {
    const ValueId first = recording_.same_impl[known.value];
    const Value& value = recording_.graph.values[first];
    if (!is_named(value)) continue;
    recording_.tensors[first] = known.tensor;
    if (value.kind == ValueKind::kParameter) check_not_frozen(known.tensor, value);
  }
}

void Identities::check_as_before(const at::Tensor& tensor, const Identity& known) const {
  const Value& value = recording_.graph.values[known.value];
  check_history(tensor, known);
  if (value.kind == ValueKind::kParameter) check_not_frozen(tensor, value);
  if (value.kind != ValueKind::kConstant) return;
  check_untrained(tensor);
  if (owns_memory(tensor)) return;
  // It may be gone when the body has ended, so it is looked at now.
  for (const ConstantTensor& constant : recording_.constants) {
    if (constant.value == known.value) check_unchanged(constant, recording_.where());
  }
}

void Identities::check_history(const at::Tensor& tensor, const Identity& known) const {
  if (history_of(tensor) != known.history) refuse_custom_function(tensor, recording_.where());
  const Value& first = recording_.graph.values[recording_.same_impl[known.value]];  // before it was written to
  if (is_trained(tensor) && !is_named(first) && !known.was_trained) refuse_trained(tensor, recording_.where());
}

void Identities::check_not_frozen(const at::Tensor& tensor, const Value& value) const {
  if (tensor.requires_grad() != value.spec.requires_grad)
    refuse_freezing(value.name, tensor.requires_grad(), recording_.where());
}

// Without grad mode no gradient can reach it, as in the loop: a teacher whose parameters nobody has frozen.
void Identities::check_untrained(const at::Tensor& constant) const {
  if (!at::GradMode::is_enabled()) return;
  check_made_here(constant);
  TORCH_CHECK(!constant.requires_grad(), recording_.where(),
              ": expected trainable tensors to be parameters that the model had when it was wrapped, got a tensor of sizes ",
              constant.sizes(),
              " that requires a gradient and is none of them. Call register_parameter and replace_module before "
              "DistributedModel is made, detach() it outside of the step, or use it without grad mode (no_grad).");
}

void Identities::check_made_here(const at::Tensor& tensor) const {
  TORCH_CHECK(
      tensor.grad_fn() == nullptr, recording_.where(),
      ": expected operators of the step body only, got a tensor computed with gradients outside of it or on another thread. "
      "Its gradient would be lost: compute it inside the body, on the body's thread, or detach() it outside of the step.");
}

}  // namespace smp::runtime
