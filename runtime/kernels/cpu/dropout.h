// The masks of dropout: LibTorch asks its generator for each number, which takes a sixth of a transformer's training.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace smp::runtime {

/// Fills `mask` as mask.bernoulli_(p) does with the default generator, which is then in the same state. False, and nothing
/// done, where that would not give the same bits: for other than contiguous float or bfloat16 on a CPU, after an odd number
/// of other draws, for what is no probability, and where LibTorch draws in another way, which is tried once.
bool fill_bernoulli(at::Tensor& mask, double p);

/// The OwnKernel of aten::bernoulli_.float.
void bernoulli_in_place(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace smp::runtime
