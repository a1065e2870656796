// Functions of the program that smp calls: around the partition and around steps, and in place of the mean over replicas.
// DistributedModel registers them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace smp {

namespace engine {
class Hooks;
}

/// Called without arguments, on every rank and in the order of registration; what it works on it captures.
using Hook = std::function<void()>;

/// Takes a hook away again. Copies stand for the same hook; dropping one takes nothing away.
///
///   smp::HookHandle handle = model.register_step_post_hook([&] { ++num_steps; });
///   handle.remove();
class HookHandle {
 public:
  HookHandle() = default;
  HookHandle(const std::shared_ptr<engine::Hooks>& hooks, int64_t id) : hooks_(hooks), id_(id) {}
  /// The hook is not called any more. Does nothing a second time and when the model is gone; allowed within a hook.
  void remove();

 private:
  std::weak_ptr<engine::Hooks> hooks_;
  int64_t id_ = -1;
};

/// Gradients of several parameters on their way to the other replicas.
struct GradientBucket {
  at::Tensor gradients;  // [number of elements], a copy: zeros where a parameter has no gradient here
  int64_t index = 0;     // of the step's buckets, in the order in which they leave
  bool is_last = false;
};

/// Takes the place of the mean over replicas: returns what every replica puts in place of
/// `gradients`, same shape and type, the same values on each. Runs on every rank, for the same
/// buckets in the same order, so it may call collectives over CommGroup::DP_GROUP.
using CommHook = std::function<at::Tensor(const GradientBucket&)>;

}  // namespace smp
