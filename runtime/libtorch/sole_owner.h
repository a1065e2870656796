// Whether a tensor may be written to, or handed on, because nobody else would notice.
#pragma once

#include <ATen/core/Tensor.h>

namespace smp::runtime {

/// Nobody else holds the tensor or its memory. A view that autograd knows keeps its base, and that the memory: the base does
/// not count.
inline bool is_sole_owner(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.use_count() != 1 || !tensor.has_storage()) return false;
  const bool is_only_view = tensor.is_view() && tensor._base().use_count() == 1;
  return tensor.storage().use_count() == (is_only_view ? 2 : 1);
}

/// And it is all of the memory.
inline bool owns_all_of_its_memory(const at::Tensor& tensor) {
  return is_sole_owner(tensor) && tensor.storage().nbytes() == tensor.nbytes();
}

}  // namespace smp::runtime
