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

/// The texts for a tensor of which one of these has changed. `place` begins them.
[[noreturn]] void refuse_custom_function(const at::Tensor& tensor, const std::string& place);
[[noreturn]] void refuse_trained(const at::Tensor& tensor, const std::string& place);

}  // namespace smp::runtime
