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
  bool is_persistent = true;  // part of the model's state
};

/// The model's parameters and buffers, found by identity: by TensorImpl, else by the storage they live on.
///
/// A tensor that the module registers several times (one submodule under two names) is one tensor
/// here too, under its first name: that one stands in graphs, plans and homes.
class Bindings {
 public:
  /// One name of the module.
  struct Name {
    partitioner::ValueKind kind = partitioner::ValueKind::kParameter;
    std::string name;
    size_t tensor = 0;  // in tensors()
    bool is_persistent = true;
  };

  Bindings() = default;
  /// `named`: every name of the module, in its order; tensors may repeat, names may not.
  explicit Bindings(std::vector<NamedTensor> named);

  /// Null when `tensor` is no parameter or buffer itself.
  const NamedTensor* find(const at::Tensor& tensor) const;
  /// Null when none of tensors() has this name.
  const NamedTensor* find_named(const std::string& name) const;
  /// Null when no parameter or buffer lives on the storage of `tensor`.
  const NamedTensor* find_storage(const at::Tensor& tensor) const;
  /// The first of tensors() that lives on the storage of `named`, one of them.
  const NamedTensor& first_on_storage(const NamedTensor& named) const;
  /// Each tensor once, under its first name, in the order of these names.
  const std::vector<NamedTensor>& tensors() const { return tensors_; }
  /// Every name, in the module's order.
  const std::vector<Name>& names() const { return names_; }

 private:
  std::vector<NamedTensor> tensors_;
  std::vector<Name> names_;
  std::unordered_map<const c10::TensorImpl*, size_t> by_impl_;
  std::unordered_map<const c10::StorageImpl*, size_t> by_storage_;
  std::unordered_map<std::string, size_t> by_name_;
};

}  // namespace smp::runtime
