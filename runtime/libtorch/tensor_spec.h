// The geometry of tensors, tensors of a geometry, and those that are constants of a graph.
#pragma once

#include <ATen/core/Tensor.h>

#include "partitioner/graph/graph.h"

namespace smp::runtime {

/// The content of a constant of a graph, as of one run.
struct ConstantContent {
  partitioner::ValueId value = partitioner::kNoValue;
  at::Tensor tensor;
};

partitioner::TensorSpec spec_of(const at::Tensor& tensor);

/// Same sizes, strides, offset and dtype.
bool same_geometry(const at::Tensor& tensor, const partitioner::TensorSpec& spec);

/// Equal for tensors that share memory; ghosts too, which do not tell where their data is.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// A tensor of this geometry on `storage`, which is on the host, the rank's device or the meta device.
at::Tensor tensor_of(const partitioner::TensorSpec& spec, const c10::Storage& storage);

}  // namespace smp::runtime
