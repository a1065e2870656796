// Identity lookup of parameters and buffers.
#include "runtime/capture/bindings.h"

namespace smp::runtime {

Bindings::Bindings(std::vector<NamedTensor> named) {
  for (NamedTensor& each : named) {
    const c10::TensorImpl* impl = each.tensor.unsafeGetTensorImpl();
    const auto [known, is_new] = by_impl_.emplace(impl, tensors_.size());
    names_.push_back({each.kind, each.name, known->second, each.is_persistent});
    if (!is_new) {
      NamedTensor& first = tensors_[known->second];
      first.is_persistent = first.is_persistent || each.is_persistent;
      continue;
    }
    if (each.tensor.has_storage()) {
      by_storage_.emplace(impl->unsafe_storage().unsafeGetStorageImpl(), tensors_.size());
    }
    by_name_.emplace(each.name, tensors_.size());
    tensors_.push_back(std::move(each));
  }
}

const NamedTensor* Bindings::find(const at::Tensor& tensor) const {
  auto found = by_impl_.find(tensor.unsafeGetTensorImpl());
  return found == by_impl_.end() ? nullptr : &tensors_[found->second];
}

const NamedTensor* Bindings::find_named(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

const NamedTensor* Bindings::find_storage(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return nullptr;
  auto found = by_storage_.find(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  return found == by_storage_.end() ? nullptr : &tensors_[found->second];
}

const NamedTensor& Bindings::first_on_storage(const NamedTensor& named) const {
  const NamedTensor* first = find_storage(named.tensor);
  return first == nullptr ? named : *first;
}

}  // namespace smp::runtime
