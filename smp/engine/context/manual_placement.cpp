// By tensor first, then by storage.
#include "smp/engine/context/manual_placement.h"

namespace smp::engine {

void ManualPlacement::place(const at::Tensor& tensor, int stage, By by) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const int known = stage_of(tensor);
  if (known >= 0 && by == By::kGuard) stage = known;
  const auto found = by_tensor_.find(tensor.unsafeGetTensorImpl());
  if (found == by_tensor_.end() || found->second.tensor.expired() || by == By::kSetPartition) {
    by_tensor_.insert_or_assign(tensor.unsafeGetTensorImpl(), PlacedTensor{WeakTensor(tensor.getIntrusivePtr()), stage, by});
  }
  by_storage_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(),
                               PlacedStorage{tensor.storage().getWeakStorageImpl(), stage});
}

int ManualPlacement::stage_of(const at::Tensor& tensor) const {
  const auto by_tensor = by_tensor_.find(tensor.unsafeGetTensorImpl());
  if (by_tensor != by_tensor_.end() && !by_tensor->second.tensor.expired()) return by_tensor->second.stage;
  const auto by_storage = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  return by_storage == by_storage_.end() || by_storage->second.storage.expired() ? -1 : by_storage->second.stage;
}

int64_t ManualPlacement::take_lost() {
  return static_cast<int64_t>(std::erase_if(
      by_tensor_, [](const auto& item) { return item.second.by == By::kSetPartition && item.second.tensor.expired(); }));
}

}  // namespace smp::engine
