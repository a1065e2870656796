// When to look after messages between operators.
#pragma once

#include <c10/util/ApproximateClock.h>

#include <functional>

namespace smp::runtime {

/// Calls `progress`, if there is any, behind an operator when some time has passed since the last call: behind each one that
/// takes long, so that a message does not wait for many of them, and seldom between short ones, where a call costs as much
/// as an operator.
class PacedProgress {
 public:
  explicit PacedProgress(const std::function<void()>& progress) : progress_(progress ? &progress : nullptr) {}

  void operator()() {
    if (progress_ == nullptr) return;
    const c10::approx_time_t now = c10::getApproximateTime();
    if (now - last_ < kInterval) return;
    (*progress_)();
    last_ = now;
  }

 private:
  static constexpr c10::approx_time_t kInterval = 60'000;  // ticks of the processor, about 25 us; where it has none, ns

  const std::function<void()>* progress_;
  c10::approx_time_t last_ = c10::getApproximateTime();
};

}  // namespace smp::runtime
