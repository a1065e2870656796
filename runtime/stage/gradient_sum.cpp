// AccumulateGrad's own arithmetic, called directly.
#include "runtime/stage/gradient_sum.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "runtime/libtorch/sole_owner.h"

namespace smp::runtime {

using torch::autograd::AccumulateGrad;

void add_to_grad(const at::Tensor& parameter, at::Tensor gradient) {
  const at::NoGradGuard no_grad;
  at::Tensor& sum = const_cast<at::Tensor&>(parameter).mutable_grad();
  // A view that shares memory with another gradient would be written to through both.
  if (!sum.defined() && gradient.layout() == at::kStrided && !is_sole_owner(gradient)) {
    sum = torch::autograd::utils::clone_obey_contract(gradient, parameter);
  } else {
    AccumulateGrad::accumulateGrad(parameter, sum, gradient, /*num_expected_refs=*/1,
                                   [&sum](at::Tensor&& made) { sum = std::move(made); });
  }
  tell_accumulated(parameter, std::move(gradient));
}

void tell_accumulated(const at::Tensor& parameter, at::Tensor gradient) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return;
  const torch::autograd::variable_list none, gradients{std::move(gradient)};
  for (const auto& hook : accumulator->post_hooks()) (*hook)(none, gradients);
}

bool has_gradient_hooks(const at::Tensor& parameter) {
  if (!torch::autograd::impl::hooks(parameter).empty()) return true;
  if (torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr) return true;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return accumulator && !accumulator->pre_hooks().empty();
}

}  // namespace smp::runtime
