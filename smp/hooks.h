// Functions of the program that smp calls around the partition and around steps. DistributedModel registers them.
#pragma once

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

}  // namespace smp
