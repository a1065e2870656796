// Where the user has placed tensors by hand.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <unordered_map>

namespace smp::engine {

/// Weak, so that its address is not used again.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Stages chosen by hand, by tensor and by storage: a module that detaches what it was given keeps
/// the storage, and one that is converted (net->to(at::kDouble)) keeps the tensor objects.
class ManualPlacement {
 public:
  enum class By { kGuard, kSetPartition };
  /// kSetPartition overrides what was there, kGuard does not: a later guard may see the tensor again.
  void place(const at::Tensor& tensor, int stage, By by);
  /// Stage of a tensor, or -1.
  int stage_of(const at::Tensor& tensor) const;
  /// How many tensors placed by set_partition no longer exist; counts each once.
  int64_t take_lost();
  /// How many PartitionGuards are open. One may outlive the job.
  const std::shared_ptr<std::atomic<int>>& open_guards() const { return open_guards_; }

 private:
  struct PlacedTensor {
    WeakTensor tensor;
    int stage;
    By by;
  };
  struct PlacedStorage {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int stage;
  };
  std::unordered_map<const c10::TensorImpl*, PlacedTensor> by_tensor_;
  std::unordered_map<const c10::StorageImpl*, PlacedStorage> by_storage_;
  std::shared_ptr<std::atomic<int>> open_guards_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace smp::engine
