// What programs of this folder have in common: they compute on a GPU, or end with an error.
#pragma once

#include <ATen/ops/ones.h>

#include "runtime/device/device.h"
#include "runtime/libtorch/deterministic.h"

namespace smp::tests {

using DeterministicAlgorithms = runtime::DeterministicScope;

/// Gives the GPU some milliseconds of work. The one of tests/fake_gpu finds what is out of order however fast it is.
inline void something_slow() {
  const int64_t width = runtime::this_ranks_device().model() == "none" ? 2 : 2048;
  at::Tensor x = at::ones({width, width}, at::kCUDA);
  for (int i = 0; i < 20; ++i) x = x.mm(x).div_(width);
}

}  // namespace smp::tests
