// What autograd knows of the tensors that a body sees, which operators set and nothing else may.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <string>

namespace smp::runtime {

/// The node that made a tensor, and the one that made the tensor it is a view of. Between two operators neither changes,
/// unless a custom autograd function puts its own there.
struct History {
  const torch::autograd::Node* own = nullptr;
  const torch::autograd::Node* base = nullptr;
  bool operator==(const History&) const = default;
};

History history_of(const at::Tensor& tensor);

/// Whether requires_grad was set on the tensor itself.
bool is_trained(const at::Tensor& tensor);

/// What a body leaves at a parameter as it is, since stages take it into account later.
struct Training {
  bool requires_grad = false;
  size_t num_hooks = 0;  // on its gradient: another number where they have changed; those of Python on one tensor are one
  bool operator==(const Training&) const = default;
};

Training training_of(const at::Tensor& parameter);
/// The texts for one whose Training the body has changed from `before`.
[[noreturn]] void refuse_other_training(const at::Tensor& parameter, const Training& before, const std::string& name,
                                        const std::string& place);
/// `is_trained`: from now on.
[[noreturn]] void refuse_freezing(const std::string& name, bool is_trained, const std::string& place);

/// The texts for a tensor of which one of these has changed. `place` begins them.
[[noreturn]] void refuse_custom_function(const at::Tensor& tensor, const std::string& place);
[[noreturn]] void refuse_trained(const at::Tensor& tensor, const std::string& place);

}  // namespace smp::runtime
