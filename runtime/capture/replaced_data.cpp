// The question before, the memory after.
#include "runtime/capture/replaced_data.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "runtime/capture/ghosts.h"
#include "runtime/device/device.h"

namespace smp::runtime {
namespace {

// Strides of single elements say nothing.
bool has_layout_of(const at::Tensor& source, const at::Tensor& tensor) {
  if (!source.sizes().equals(tensor.sizes())) return false;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && source.stride(d) != tensor.stride(d)) return false;
  }
  return true;
}

void check_fits(const NamedTensor& named, const at::Tensor& source, const std::string& place) {
  const at::Tensor& own = named.tensor;
  const bool is_here = source.device() == own.device() || is_on_this_ranks_device(source);
  TORCH_CHECK_NOT_IMPLEMENTED(
      source.scalar_type() == own.scalar_type() && is_here && has_layout_of(source, own), place, ": expected the data of '",
      named.name, "' to be replaced (set_data, in Python .data = ) by a tensor like it, ", own.scalar_type(), " of sizes ",
      own.sizes(), " and strides ", own.strides(), ", got ", source.scalar_type(), " of sizes ", source.sizes(),
      " and strides ", source.strides(), " on ", source.device(),
      ". Ranks, optimizer and checkpoints have it as it was when the model was wrapped: give it a tensor of that form, or "
      "write into a part of it with copy_.");
}

}  // namespace

bool ReplacedData::asks(const c10::OperatorHandle& op) {
  static const c10::OperatorHandle question =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::_has_compatible_shallow_copy_type", "");
  return op == question;
}

bool ReplacedData::note(const at::Tensor& tensor, const at::Tensor& source, const std::string& place) {
  const NamedTensor* named = bindings_.find(tensor);
  if (named == nullptr || !tensor.has_storage() || !source.has_storage()) return false;
  check_fits(*named, source, place);
  if (storage_of(tensor) == storage_of(source)) {
    const bool was_replaced = std::find(replaced_.begin(), replaced_.end(), tensor.unsafeGetTensorImpl()) != replaced_.end();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !was_replaced, place, ": expected the data of '", named->name,
        "' to be replaced once by others, got its own memory again, which has their content by then. Keep a "
        "clone() of what it had, or give the others a name of their own.");
    TORCH_CHECK_NOT_IMPLEMENTED(source.storage_offset() == tensor.storage_offset(), place, ": expected the data of '",
                                named->name,
                                "' to be replaced by other memory, got a part of its own that begins elsewhere. "
                                "Give it a clone() of that.");
    return true;  // nothing will have changed
  }
  for (const NamedTensor& other : bindings_.tensors()) {
    const bool is_tied =
        !other.tensor.is_same(tensor) && other.tensor.has_storage() && storage_of(other.tensor) == storage_of(tensor);
    TORCH_CHECK_NOT_IMPLEMENTED(!is_tied, place, ": expected the data of a tensor with memory of its own to be replaced ",
                                "(set_data, in Python .data = ), got '", named->name, "', which shares it with '",
                                other.name, "' and would no longer. Write into it with copy_.");
  }
  auto own = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  asked_ = Asked{.call = {tensor, source}, .own = std::move(own)};
  return true;
}

std::optional<ReplacedData::Call> ReplacedData::take() {
  if (!asked_) return {};
  const Call call = asked_->call;
  const bool was_replaced = storage_of(call.tensor) == storage_of(call.source);
  give_back();
  if (was_replaced) replaced_.push_back(call.tensor.unsafeGetTensorImpl());
  return was_replaced ? std::optional(call) : std::nullopt;
}

void ReplacedData::give_back() noexcept {
  if (!asked_) return;
  asked_->call.tensor.unsafeGetTensorImpl()->shallow_copy_from(asked_->own);
  asked_.reset();
}

TORCH_LIBRARY_FRAGMENT(smp, library) {
  library.def("set_data(Tensor(a!) self, Tensor source) -> Tensor(a!)");
  library.impl("set_data", c10::DispatchKey::CompositeImplicitAutograd,
               [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& { return self.copy_(source); });
}

}  // namespace smp::runtime
