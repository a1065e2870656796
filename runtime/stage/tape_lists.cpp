// Geometries, memories, and views past the dispatcher.
#include "runtime/stage/tape_lists.h"

#include <algorithm>

#include "runtime/libtorch/memory_tensor.h"
#include "runtime/libtorch/tensor_spec.h"

namespace smp::runtime {

using partitioner::TensorSpec;

TensorSpec geometry_of(const at::Tensor& tensor) {
  TensorSpec geometry = spec_of(tensor);
  geometry.requires_grad = false;
  return geometry;
}

bool fits(const at::Tensor& tensor, const TensorSpec& geometry) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
         same_geometry(tensor, geometry);
}

std::vector<int64_t> memory_bytes(const TapeLists& lists) {
  std::vector<int64_t> bytes;
  for (size_t slot = 0; slot < lists.num_slots; ++slot) {
    const size_t memory = lists.memory_of(static_cast<int32_t>(slot));
    if (bytes.size() <= memory) bytes.resize(memory + 1);
    bytes[memory] = std::max(bytes[memory], extent_bytes(lists.slot_geometries[slot]));
  }
  return bytes;
}

void keep_calls(TapeLists& lists, const std::vector<bool>& stays) {
  std::vector<TapeCall> kept;
  std::vector<size_t> position(lists.calls.size() + 1);
  for (size_t n = 0; n < lists.calls.size(); ++n) {
    position[n] = kept.size();
    if (stays[n]) kept.push_back(std::move(lists.calls[n]));
  }
  position.back() = kept.size();
  lists.forward_end = position[lists.forward_end];
  for (TapeBackward& backward : lists.backwards) backward.end = position[backward.end];
  lists.calls = std::move(kept);
}

at::Tensor view_of(const at::Tensor& base, const TensorSpec& geometry) {
  auto impl =
      c10::make_intrusive<at::TensorImpl>(at::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  impl->set_storage_offset(geometry.storage_offset);
  impl->set_sizes_and_strides(geometry.sizes, geometry.strides);
  impl->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
  return at::Tensor(std::move(impl));
}

}  // namespace smp::runtime
