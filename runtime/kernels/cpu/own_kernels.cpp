// The operators that have one.
#include "runtime/kernels/cpu/own_kernels.h"

#include "runtime/kernels/cpu/dropout.h"

namespace smp::runtime {

OwnKernel own_kernel_of(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  return name.name == "aten::bernoulli_" && name.overload_name == "float" ? bernoulli_in_place : nullptr;
}

}  // namespace smp::runtime
