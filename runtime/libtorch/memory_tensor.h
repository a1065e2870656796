// Tensors on memory that something else holds. Owns nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "partitioner/graph/graph.h"
#include "runtime/device/device.h"

namespace smp::runtime {

/// A tensor of its own storage on `data` of `device`, which `holder` keeps until the tensor's storage dies. What
/// at::from_blob does, in a quarter of its time: microbatches and messages are made so, each step anew. `strides`: in
/// elements, none negative; the extent that they span must lie within the memory.
at::Tensor tensor_on(const Device& device, void* data, at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype,
                     std::shared_ptr<const void> holder);

/// Bytes from `storage_offset` elements before the first element to one past the last; 0 for an empty tensor.
int64_t extent_bytes(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t element_bytes, int64_t storage_offset = 0);
int64_t extent_bytes(const partitioner::TensorSpec& spec);

}  // namespace smp::runtime
