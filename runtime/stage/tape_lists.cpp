// Geometries, and views past the dispatcher.
#include "runtime/stage/tape_lists.h"

#include "runtime/libtorch/tensor_spec.h"

namespace smp::runtime {

using partitioner::TensorSpec;

TensorSpec geometry_of(const at::Tensor& tensor) {
  TensorSpec geometry = spec_of(tensor);
  geometry.requires_grad = false;
  return geometry;
}

bool fits(const at::Tensor& tensor, const TensorSpec& geometry) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
         same_geometry(tensor, geometry);
}

at::Tensor view_of(const at::Tensor& base, const TensorSpec& geometry) {
  auto impl =
      c10::make_intrusive<at::TensorImpl>(at::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  impl->set_storage_offset(geometry.storage_offset);
  impl->set_sizes_and_strides(geometry.sizes, geometry.strides);
  impl->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
  return at::Tensor(std::move(impl));
}

}  // namespace smp::runtime
