// A kernel of ours in the place of LibTorch's, with the same bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace smp::runtime {

/// Does what op.callBoxed(stack) does below autograd, but for version counters, which a tape has no use for.
using OwnKernel = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Null where LibTorch's is as good. There is one for aten::bernoulli_, which draws the masks of dropout: LibTorch asks its
/// generator for each number, which takes a sixth of a transformer's training.
OwnKernel own_kernel_of(const c10::OperatorHandle& op);

/// Fills `mask` as mask.bernoulli_(p) does with the default generator, which is then in the same state. False, and nothing
/// done, where that would not give the same bits: for other than contiguous float or bfloat16 on a CPU, after an odd number
/// of other draws, for what is no probability, and where LibTorch draws in another way, which is tried once.
bool fill_bernoulli(at::Tensor& mask, double p);

}  // namespace smp::runtime
