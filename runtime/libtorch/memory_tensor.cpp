// Tensors made past the dispatcher.
#include "runtime/libtorch/memory_tensor.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/StorageImpl.h>

namespace smp::runtime {

using Holder = std::shared_ptr<const void>;

int64_t extent_bytes(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t element_bytes, int64_t storage_offset) {
  return static_cast<int64_t>(at::detail::computeStorageNbytes(sizes, strides, static_cast<size_t>(element_bytes),
                                                               static_cast<size_t>(storage_offset)));
}

int64_t extent_bytes(const partitioner::TensorSpec& spec) {
  return extent_bytes(spec.sizes, spec.strides, static_cast<int64_t>(c10::elementSize(spec.dtype)), spec.storage_offset);
}

at::Tensor tensor_on(const Device& device, void* data, at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype,
                     Holder holder) {
  const int64_t bytes = extent_bytes(sizes, strides, static_cast<int64_t>(c10::elementSize(dtype)));
  c10::DataPtr memory(
      data, new Holder(std::move(holder)), [](void* held) { delete static_cast<Holder*>(held); }, device.current());
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(bytes),
                                                       std::move(memory), /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(device.backend), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

}  // namespace smp::runtime
