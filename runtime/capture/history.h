// What autograd knows of the tensors that a body sees, which operators set and nothing else may.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <string>
#include <vector>

#include "runtime/capture/bindings.h"

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

/// What a body leaves at parameters as it is: what it does to one for one microbatch would hold for all, or for none, since
/// the stages run them later.
class Training {
 public:
  explicit Training(const Bindings& bindings) : bindings_(bindings) {}
  void note();
  /// Throws for a parameter of which something is not as noted. `module` is for the text.
  void check(const std::string& module) const;

 private:
  struct State {
    bool requires_grad = false;
    size_t num_hooks = 0;  // on its gradient: another number where they have changed; those of Python on one tensor are one
    bool operator==(const State&) const = default;
  };
  static State state_of(const at::Tensor& parameter);

  const Bindings& bindings_;
  std::vector<State> noted_;  // of bindings_.tensors()
};

/// `is_trained`: from now on.
[[noreturn]] void refuse_freezing(const std::string& name, bool is_trained, const std::string& place);

/// The texts for a tensor of which one of these has changed. `place` begins them.
[[noreturn]] void refuse_custom_function(const at::Tensor& tensor, const std::string& place);
[[noreturn]] void refuse_trained(const at::Tensor& tensor, const std::string& place);

}  // namespace smp::runtime
