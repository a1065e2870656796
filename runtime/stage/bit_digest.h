// Digests of tensors' bits, to compare two runs without keeping what the first has made.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace smp::runtime {

/// 64 bits of everything that later operators could tell two tensors apart by: dtype, sizes, strides and the bits of the
/// elements. An undefined tensor has the digest 0.
uint64_t bit_digest(const at::Tensor& tensor);

}  // namespace smp::runtime
