// How ranks wait, and how often they look after messages while they compute.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <functional>

#include "runtime/stage/paced_progress.h"
#include "runtime/transport/backoff.h"

namespace smp::runtime {
namespace {

using namespace std::chrono_literals;

/// How often this thread has given its core away to wait for something, as sched_yield() does not.
long num_sleeps() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

/// Sleeps of so many pauses after a wait of at least that length.
long num_sleeps_after(Backoff& backoff, std::chrono::milliseconds waited, int pauses) {
  while (backoff.elapsed() < waited) backoff.pause();
  const long before = num_sleeps();
  for (int i = 0; i < pauses; ++i) backoff.pause();
  return num_sleeps() - before;
}

// Once at least: the system does not count a sleep that was over before it began.
TEST(Backoff, SleepsSoonWhereRanksShareACore) {
  Backoff backoff(/*has_own_core=*/false);
  EXPECT_EQ(backoff.elapsed(), Backoff::Clock::duration::zero());
  EXPECT_GT(num_sleeps_after(backoff, 5ms, 50), 0);
}

TEST(Backoff, LooksAgainAtOnceOnACoreOfItsOwn) {
  Backoff backoff(/*has_own_core=*/true);
  for (int i = 0; i < 1000; ++i) backoff.pause();
  EXPECT_EQ(backoff.elapsed(), Backoff::Clock::duration::zero());
  backoff.pause();
  EXPECT_GT(backoff.elapsed(), Backoff::Clock::duration::zero());
}

TEST(Backoff, KeepsACoreOfItsOwnForTheLengthOfABubble) {
  EXPECT_FALSE(Backoff(true).sleeps_after(999ms));
  EXPECT_TRUE(Backoff(true).sleeps_after(1000ms));
  EXPECT_FALSE(Backoff(false).sleeps_after(4ms));
  EXPECT_TRUE(Backoff(false).sleeps_after(5ms));
}

TEST(PacedProgress, LooksBehindALongOperatorAndSeldomBetweenShortOnes) {
  constexpr c10::approx_time_t kLong = 1'000'000;  // ticks
  constexpr int kShortOperators = 100'000;         // of some ticks each
  int looks = 0;
  const std::function<void()> look = [&looks] { ++looks; };
  PacedProgress progress(look);
  for (int i = 1; i <= 3; ++i) {
    const c10::approx_time_t start = c10::getApproximateTime();
    while (c10::getApproximateTime() - start < kLong) {
    }
    progress();
    EXPECT_EQ(looks, i);
  }
  for (int i = 0; i < kShortOperators; ++i) progress();
  EXPECT_LT(looks, kShortOperators / 2);
}

TEST(PacedProgress, MayHaveNothingToLookAfter) {
  const std::function<void()> none;
  PacedProgress progress(none);
  progress();
}

}  // namespace
}  // namespace smp::runtime
