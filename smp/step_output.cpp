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

at::Tensor StepOutput::reduce_sum() const {
  TORCH_CHECK_VALUE(!outputs_.empty(), "StepOutput: expected the result of a step, got an empty StepOutput.");
  at::Tensor sum = outputs_[0].clone();
  for (size_t m = 1; m < outputs_.size(); ++m) sum.add_(outputs_[m]);
  return sum;
}

at::Tensor StepOutput::reduce_mean() const { return reduce_sum().div_(size()); }

at::Tensor StepOutput::concat(int64_t batch_dim) const { return at::cat(outputs_, batch_dim); }

at::Tensor StepOutput::stack() const { return at::stack(outputs_); }

}  // namespace smp
