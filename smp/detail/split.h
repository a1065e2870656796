// Cutting step arguments into microbatches. Owns no state.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::detail {

/// result[m][argument]: equal parts along dimension 0, each aligned like a tensor of its own, because misaligned data
/// change bits (libtorch-facts C): on the argument's memory where that is so anyway, copies elsewhere. Who writes to a
/// part copies it first. Checks every argument before it copies any.
/// Throws c10::ValueError for scalars, batches that `microbatches` does not divide, tensors that require a gradient, and
/// tensors that are not dense CPU tensors.
std::vector<std::vector<at::Tensor>> split_arguments(const std::vector<at::Tensor>& arguments, int64_t microbatches);

}  // namespace smp::detail
