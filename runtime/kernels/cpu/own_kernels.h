// Kernels of ours in the place of LibTorch's, with the same bits.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace smp::runtime {

/// Does what op.callBoxed(stack) does below autograd, but for version counters, which a tape has no use for.
using OwnKernel = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Null where LibTorch's is as good.
OwnKernel own_kernel_of(const c10::OperatorHandle& op);

}  // namespace smp::runtime
