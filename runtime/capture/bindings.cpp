// Identity lookup of parameters and buffers.
#include "runtime/capture/bindings.h"

namespace smp::runtime {

Bindings::Bindings(std::vector<NamedTensor> tensors) : tensors_(std::move(tensors)) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& tensor = tensors_[i].tensor;
    by_impl_.emplace(tensor.unsafeGetTensorImpl(), i);
    if (tensor.has_storage()) {
      by_storage_.emplace(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), i);
    }
  }
}

const NamedTensor* Bindings::find(const at::Tensor& tensor) const {
  auto found = by_impl_.find(tensor.unsafeGetTensorImpl());
  return found == by_impl_.end() ? nullptr : &tensors_[found->second];
}

const NamedTensor* Bindings::find_storage(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return nullptr;
  auto found = by_storage_.find(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  return found == by_storage_.end() ? nullptr : &tensors_[found->second];
}

}  // namespace smp::runtime
