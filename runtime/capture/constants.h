// The content of tensors that a step body uses and that are neither parameter, buffer nor argument.
#pragma once

#include <ATen/core/Tensor.h>

#include "partitioner/graph/graph.h"

namespace smp::runtime {

/// A constant of a step body. Its content travels, and may be rewritten at any time: by operators outside of the step,
/// or through a raw pointer, which leaves no trace. So every use is compared with a copy, byte by byte.
struct ConstantTensor {
  partitioner::ValueId value = partitioner::kNoValue;
  at::Tensor tensor;           // the user's
  at::Tensor content;          // a dense copy, made at the first use in a body
  bool requires_grad = false;  // at that use, which was without grad mode
};

/// False for tensors that are not on the CPU or whose bytes are not their values (quantized, lazily conjugated or negated).
bool can_be_constant(const at::Tensor& tensor);

/// A dense copy in the same dimension order, as other ranks receive it. Needs can_be_constant(tensor).
at::Tensor snapshot_of(const at::Tensor& tensor);

/// Whether `tensor` has the sizes, dtype and bytes of `snapshot`, and would have its strides.
bool same_content(const at::Tensor& tensor, const at::Tensor& snapshot);

/// False for from_blob without a deleter: the memory may be gone when the body has ended.
bool owns_memory(const at::Tensor& tensor);

/// Throws when `constant` was rewritten after its first use in the body; `place` begins the text.
void check_unchanged(const ConstantTensor& constant, const std::string& place);

}  // namespace smp::runtime
