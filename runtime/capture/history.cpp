// Reads what autograd keeps beside a tensor.
#include "runtime/capture/history.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include "runtime/capture/places.h"

namespace smp::runtime {

namespace autograd = torch::autograd::impl;

History history_of(const at::Tensor& tensor) {
  const auto* view = autograd::get_view_autograd_meta(tensor);
  const bool has_base = view != nullptr && view->has_bw_view();
  return {.own = autograd::grad_fn_unsafe(tensor),
          .base = has_base ? autograd::grad_fn_unsafe(view->get_backward_view().base_) : nullptr};
}

bool is_trained(const at::Tensor& tensor) {
  const auto* meta = autograd::get_autograd_meta(tensor);
  return meta != nullptr && meta->requires_grad_;
}

Training::State Training::state_of(const at::Tensor& parameter) {
  State training{.requires_grad = parameter.requires_grad()};
  if (const auto* meta = autograd::get_autograd_meta(parameter)) {
    training.num_hooks = meta->hooks_.size() + (meta->post_acc_grad_hooks_ != nullptr ? 1 : 0);
    if (meta->cpp_hooks_list_) {  // one that is taken away leaves an empty place
      for (const auto& hook : *meta->cpp_hooks_list_) training.num_hooks += hook ? 2 : 1;
    }
  }
  return training;
}

void Training::note() {
  noted_.clear();
  for (const NamedTensor& named : bindings_.tensors()) noted_.push_back(state_of(named.tensor));
}

void Training::check(const std::string& module) const {
  for (size_t i = 0; i < noted_.size(); ++i) {
    const NamedTensor& named = bindings_.tensors()[i];
    const bool is_trained = named.tensor.requires_grad();
    if (state_of(named.tensor) == noted_[i]) continue;
    const std::string place = describe_place("capture", module);
    if (is_trained != noted_[i].requires_grad) refuse_freezing(named.name, is_trained, place);
    TORCH_CHECK_NOT_IMPLEMENTED(false, place, ": expected the body to leave the gradient hooks of '", named.name,
                                "' as they are, got a change. The backward runs after the body, on the rank where the "
                                "parameter is. Hook it outside of the step, on every rank.");
  }
}

void refuse_freezing(const std::string& name, bool is_trained, const std::string& place) {
  TORCH_CHECK(false, place, ": expected '", name, "' to keep requires_grad=", is_trained ? "false" : "true",
              " while the body runs, got a change to ", is_trained ? "true" : "false",
              ". The stages run the operators after the body, and on other ranks. Set it outside of the step, on every "
              "rank, or use parameter.detach() in the body.");
}

void refuse_custom_function(const at::Tensor& tensor, const std::string& place) {
  const auto [own, base] = history_of(tensor);
  const torch::autograd::Node* node = own != nullptr ? own : base;
  TORCH_CHECK(false, place, ": expected gradient functions that operators have made, got '",
              node != nullptr ? node->name() : "none", "' on a tensor of sizes ", tensor.sizes(),
              ": a custom autograd function (torch::autograd::Function) has put it there, and its backward cannot be "
              "captured. Call it through smp::opaque, or write it with differentiable operators. If it is a buffer, an "
              "earlier microbatch may have written to it with gradients: write to buffers under torch::NoGradGuard.");
}

void refuse_trained(const at::Tensor& tensor, const std::string& place) {
  TORCH_CHECK(
      false, place, ": expected trainable tensors to be parameters of the model, got a tensor of sizes ", tensor.sizes(),
      " of the step body that was made to require a gradient (requires_grad_). Nobody could read that: the body "
      "runs on ghosts and the backward on other tensors. Register a parameter, or take gradients with respect to "
      "inputs (a penalty) by torch::autograd::grad within smp::opaque. Functions of TorchScript do so once they have been "
      "profiled: call torch::jit::setFusionStrategy({}) at the start of the program.");
}

}  // namespace smp::runtime
