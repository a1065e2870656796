// Geometries, and views past the dispatcher.
#include "runtime/stage/tape_lists.h"

namespace smp::runtime {

TapeGeometry TapeGeometry::of(const at::Tensor& tensor) {
  TapeGeometry geometry;
  geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  geometry.strides.assign(tensor.strides().begin(), tensor.strides().end());
  geometry.storage_offset = tensor.storage_offset();
  geometry.dtype = tensor.scalar_type();
  return geometry;
}

bool TapeGeometry::fits(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.sizes().equals(sizes) &&
         tensor.strides().equals(strides) && tensor.storage_offset() == storage_offset && tensor.scalar_type() == dtype &&
         !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor view_of(const at::Tensor& base, const TapeGeometry& geometry) {
  auto impl =
      c10::make_intrusive<at::TensorImpl>(at::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  impl->set_storage_offset(geometry.storage_offset);
  impl->set_sizes_and_strides(geometry.sizes, geometry.strides);
  impl->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
  return at::Tensor(std::move(impl));
}

}  // namespace smp::runtime
