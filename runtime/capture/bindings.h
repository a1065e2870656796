// Which real tensors the captured step knows by name. Owns no data beyond references to the module's tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::runtime {

/// A parameter or buffer of the model, by qualified name.
struct NamedTensor {
  partitioner::ValueKind kind = partitioner::ValueKind::kParameter;
  std::string name;
  at::Tensor tensor;
};

/// The model's parameters and buffers, found by identity: by TensorImpl, else by the storage they live on.
class Bindings {
 public:
  Bindings() = default;
  explicit Bindings(std::vector<NamedTensor> tensors);

  /// Null when `tensor` is no parameter or buffer itself.
  const NamedTensor* find(const at::Tensor& tensor) const;
  /// Null when no parameter or buffer lives on the storage of `tensor`.
  const NamedTensor* find_storage(const at::Tensor& tensor) const;
  const std::vector<NamedTensor>& tensors() const { return tensors_; }

 private:
  std::vector<NamedTensor> tensors_;
  std::unordered_map<const c10::TensorImpl*, size_t> by_impl_;
  std::unordered_map<const c10::StorageImpl*, size_t> by_storage_;
};

}  // namespace smp::runtime
