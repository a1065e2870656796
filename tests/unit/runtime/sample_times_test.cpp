// Interrupted runs among the times of repeated ones.
#include "runtime/stage/sample_times.h"

#include <gtest/gtest.h>

#include <random>

namespace {

using smp::runtime::jitter_of;
using smp::runtime::middle_half;

constexpr double kJitter = 0.02;

std::vector<double> normal_times(size_t count) {
  std::mt19937 random(1);
  std::normal_distribution<double> deviation(0, kJitter);
  std::vector<double> times;
  for (size_t i = 0; i < count; ++i) times.push_back(100 * (1 + deviation(random)));
  return times;
}

TEST(SampleTimes, TheMiddleHalfCounts) {
  EXPECT_EQ(middle_half(1), (std::pair<size_t, size_t>(0, 1)));
  EXPECT_EQ(middle_half(3), (std::pair<size_t, size_t>(0, 3)));
  EXPECT_EQ(middle_half(16), (std::pair<size_t, size_t>(4, 12)));
}

TEST(SampleTimes, JitterIsTheStandardDeviationOfNormalTimes) {
  EXPECT_NEAR(jitter_of(normal_times(20'000)), kJitter, 0.05 * kJitter);
  EXPECT_EQ(jitter_of({}), 0);
  EXPECT_EQ(jitter_of({5}), 0);
}

TEST(SampleTimes, InterruptionsAddLittleJitter) {
  std::vector<double> times = normal_times(16);
  const double quiet = jitter_of(times);
  times[3] *= 2, times[10] *= 1.5;
  EXPECT_LT(jitter_of(times), 1.6 * quiet);
}

TEST(SampleTimes, AMachineThatGrowsSlowerHasNone) {
  std::vector<double> times;
  for (int i = 0; i < 1000; ++i) times.push_back(100 + 0.1 * i);
  EXPECT_LT(jitter_of(times), 0.003);
}

}  // namespace
