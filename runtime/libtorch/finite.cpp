// A sum is the pass over memory that every device does fast.
#include "runtime/libtorch/finite.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sum.h>

#include <cmath>

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

}  // namespace smp::runtime
