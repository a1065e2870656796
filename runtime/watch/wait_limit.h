// Owns what counts as waiting.
#pragma once

#include <algorithm>
#include <chrono>

namespace smp::runtime {

/// Of one wait, asked behind every look. A process that is stopped, as by a scheduler that suspends jobs, does not wait
/// meanwhile: what lies between two looks counts for a second at most.
class WaitLimit {
 public:
  using Duration = std::chrono::steady_clock::duration;

  /// elapsed: since the wait began, by a clock that goes on while the process is stopped.
  bool is_over(Duration elapsed, Duration limit) {
    stopped_ += std::max(elapsed - last_ - Duration(std::chrono::seconds(1)), Duration::zero());
    last_ = elapsed;
    return elapsed - stopped_ >= limit;
  }

 private:
  Duration last_{0}, stopped_{0};
};

}  // namespace smp::runtime
