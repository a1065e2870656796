// Geometry in and out of TensorImpl.
#include "runtime/libtorch/tensor_spec.h"

#include "runtime/device/device.h"

namespace smp::runtime {

using partitioner::TensorSpec;

TensorSpec spec_of(const at::Tensor& tensor) {
  return {.sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .storage_offset = tensor.storage_offset(),
          .dtype = tensor.scalar_type(),
          .requires_grad = tensor.requires_grad()};
}

bool same_geometry(const at::Tensor& tensor, const TensorSpec& spec) {
  return tensor.sizes().equals(spec.sizes) && tensor.strides().equals(spec.strides) &&
         tensor.storage_offset() == spec.storage_offset && tensor.scalar_type() == spec.dtype;
}

at::Tensor tensor_of(const TensorSpec& spec, const c10::Storage& storage) {
  const c10::DeviceType type = storage.device_type();
  const auto key = type == c10::kMeta    ? c10::DispatchKey::Meta
                   : type == host().type ? host().backend
                                         : this_ranks_device().backend;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                         c10::scalarTypeToTypeMeta(spec.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides, spec.storage_offset);
  return tensor;
}

}  // namespace smp::runtime
