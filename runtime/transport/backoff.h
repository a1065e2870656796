// Owns the pace of a waiting rank: spin, then yield, then sleep.
#pragma once

#include <sched.h>
#include <time.h>

#include <chrono>

namespace smp::runtime {

/// One wait. Call pause() after every look that found nothing.
///
/// A message between stages of a running pipeline comes within microseconds, so the first looks follow each other at once.
/// Ranks without a core of their own must yield instead: with 8 ranks on 2 cores a bare loop takes 20 times as long. Then
/// the core goes to whoever can use it, at the price of an answer that is about 0.1 ms late, 2 % of such a wait. A rank with
/// a core of its own goes on yielding for the length of any bubble: a virtual core that halts is given away, and on a busy
/// host comes back milliseconds late (pipelines of two took up to a third longer).
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Backoff(bool has_own_core)
      : num_spins_left_(has_own_core ? kNumSpins : 0), sleep_after_(has_own_core ? kLongestBubble : kSleepAfter) {}

  void pause() {
    if (num_spins_left_ > 0) {
      --num_spins_left_;
      return;
    }
    if (start_ == Clock::time_point()) start_ = Clock::now();
    if (!sleeps_after(elapsed())) {
      sched_yield();
      return;
    }
    const timespec sleep{0, kSleepNanoseconds};
    nanosleep(&sleep, nullptr);
  }

  /// Whether a wait that has taken so long gives its core away.
  bool sleeps_after(Clock::duration waited) const { return waited >= sleep_after_; }

  /// Time since the spinning ended; zero before.
  Clock::duration elapsed() const { return start_ == Clock::time_point() ? Clock::duration::zero() : Clock::now() - start_; }

 private:
  static constexpr int kNumSpins = 1000;  // about 60 us of MPI_Test, longer than 256 KB take
  static constexpr std::chrono::milliseconds kSleepAfter{5};
  static constexpr std::chrono::milliseconds kLongestBubble{1000};
  static constexpr long kSleepNanoseconds = 50000;

  int num_spins_left_;
  std::chrono::milliseconds sleep_after_;
  Clock::time_point start_;
};

}  // namespace smp::runtime
