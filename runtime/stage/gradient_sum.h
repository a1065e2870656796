// Adds gradients to parameters as autograd does, without it.
#pragma once

#include <ATen/core/Tensor.h>

namespace smp::runtime {

/// What torch::autograd::AccumulateGrad does with the gradient of a leaf: the same tensor becomes .grad, or a copy in the
/// leaf's layout, or it is added in place. Then runs the hooks that wait for it (GradientReducer's). The gradient is
/// taken over only where nothing else refers to its memory.
void add_to_grad(const at::Tensor& parameter, at::Tensor gradient);

/// Runs the hooks that wait for the gradient of a parameter, which has been added otherwise.
void tell_accumulated(const at::Tensor& parameter, at::Tensor gradient);

/// Whether the user has put hooks on the parameter that look at its gradient before it is added.
bool has_gradient_hooks(const at::Tensor& parameter);

}  // namespace smp::runtime
