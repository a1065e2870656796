// Reductions over the microbatches of a step.
#include "smp/step_output.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

namespace smp {

const at::Tensor& StepOutput::operator[](int64_t m) const {
  TORCH_CHECK_INDEX(m >= 0 && m < size(), "StepOutput: expected a microbatch in [0, ", size(), "), got ", m, ".");
  return outputs_[static_cast<size_t>(m)];
}

namespace {

void check_result(const std::vector<at::Tensor>& outputs, const char* caller) {
  TORCH_CHECK_VALUE(!outputs.empty(), caller, ": expected the result of a step, got an empty StepOutput. Assign what ",
                    "the step function returns first.");
}

at::Tensor sum_of(const std::vector<at::Tensor>& outputs) {
  const bool counts = c10::isIntegralType(outputs[0].scalar_type(), /*includeBool=*/true);
  at::Tensor sum = counts ? outputs[0].to(at::kLong, /*non_blocking=*/false, /*copy=*/true) : outputs[0].clone();
  for (size_t m = 1; m < outputs.size(); ++m) sum.add_(outputs[m]);
  return sum;
}

}  // namespace

at::Tensor StepOutput::reduce_sum() const {
  check_result(outputs_, "StepOutput::reduce_sum");
  return sum_of(outputs_);
}

at::Tensor StepOutput::reduce_mean() const {
  check_result(outputs_, "StepOutput::reduce_mean");
  TORCH_CHECK_VALUE(!c10::isIntegralType(outputs_[0].scalar_type(), /*includeBool=*/true),
                    "StepOutput::reduce_mean: expected a floating-point or complex tensor, got ", outputs_[0].scalar_type(),
                    ". Choose the dtype of the mean: reduce_sum().to(at::kDouble) / size().");
  return sum_of(outputs_).div_(size());
}

at::Tensor StepOutput::concat(int64_t batch_dim) const {
  check_result(outputs_, "StepOutput::concat");
  return at::cat(outputs_, batch_dim);
}

at::Tensor StepOutput::stack() const {
  check_result(outputs_, "StepOutput::stack");
  return at::stack(outputs_);
}

}  // namespace smp
