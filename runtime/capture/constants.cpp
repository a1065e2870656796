// Copies and comparisons of constants.
#include "runtime/capture/constants.h"

#include <ATen/ops/clone.h>
#include <c10/util/Exception.h>

#include "runtime/capture/ghosts.h"
#include "runtime/device/device.h"

namespace smp::runtime {

bool can_be_constant(const at::Tensor& tensor) {
  return (is_on_this_ranks_device(tensor) || is_on_host(tensor)) && as_ghost(tensor) == nullptr && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor snapshot_of(const at::Tensor& tensor) {
  TORCH_INTERNAL_ASSERT(can_be_constant(tensor), tensor.toString());
  // A copy would be no wrapped number any more, and nobody can write to one.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return tensor.detach().clone();
}

bool same_content(const at::Tensor& tensor, const at::Tensor& snapshot) {
  if (tensor.is_same(snapshot)) return true;
  if (!can_be_constant(tensor) || tensor.scalar_type() != snapshot.scalar_type() || tensor.sizes() != snapshot.sizes()) {
    return false;
  }
  if (!tensor.is_non_overlapping_and_dense()) return same_content(snapshot_of(tensor), snapshot);
  if (tensor.strides() != snapshot.strides() || tensor.device() != snapshot.device()) return false;
  return bytes_of(tensor.to(host().type)) == bytes_of(snapshot.to(host().type));
}

bool owns_memory(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_context() != nullptr;
}

void check_unchanged(const ConstantTensor& constant, const std::string& place) {
  TORCH_CHECK(
      same_content(constant.tensor, constant.content), place, ": expected tensors made outside of the step to ",
      "keep their content while the body runs, got one of sizes ", constant.tensor.sizes(),
      " that was rewritten after its first use, through a raw pointer or by another thread. Operators of the body run later "
      "and would read other values: make a new tensor for each content, or pass it as an argument of the step.");
}

}  // namespace smp::runtime
