// A sum is the pass over memory that every device does fast.
#include "runtime/libtorch/finite.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>

#include "runtime/device/device.h"

namespace smp::runtime {

bool is_finite(const at::Tensor& tensor) {
  if (!tensor.defined() || !(tensor.is_floating_point() || tensor.is_complex())) return true;
  const at::NoGradGuard no_grad;
  const at::Tensor values = tensor.is_sparse() ? tensor._values() : tensor;
  const bool is_short = values.element_size() < 4;
  const at::Tensor sum = at::sum(values, is_short ? std::optional(at::kFloat) : std::nullopt);
  const c10::complex<double> total = sum.item().toComplexDouble();
  if (std::isfinite(total.real()) && std::isfinite(total.imag())) return true;
  return at::isfinite(values).all().item<bool>();
}

at::Tensor norms_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms = at::_foreach_norm(tensors, 2);
  for (at::Tensor& norm : norms) norm = norm.to(at::kFloat);
  return at::stack(norms);
}

bool are_finite(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> elsewhere;  // looked at together: each answer would be waited for
  for (const at::Tensor& tensor : tensors) {
    const bool may_be_nonfinite = tensor.defined() && tensor.numel() > 0 && tensor.is_floating_point();
    if (may_be_nonfinite && !is_on_host(tensor) && tensor.layout() == at::kStrided) {
      elsewhere.push_back(tensor);
    } else if (!is_finite(tensor)) {
      return false;
    }
  }
  if (elsewhere.empty()) return true;
  if (at::isfinite(norms_of(elsewhere)).all().item<bool>()) return true;
  return std::all_of(elsewhere.begin(), elsewhere.end(), is_finite);  // squares of finite numbers may be infinite
}

}  // namespace smp::runtime
