// split_chain against exhaustive search and the quadratic table, and its properties.
#include "partitioner/partition/contiguous.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/support/chains.h"

namespace smp::partitioner {
namespace {

using smp::testing::ChainTraits;
using smp::testing::lower_bound_us;
using smp::testing::plain_chain;
using smp::testing::random_chain;
using smp::testing::reference_slowest_us;
using smp::testing::split_by_table;
using smp::testing::split_exhaustively;

double slowest_of(const Chain& chain, const ChainSplit& split) {
  const auto end = split.cuts.begin() + split.num_used_stages + 1;
  return reference_slowest_us(chain, {split.cuts.begin(), end});
}

bool has_split(const Chain& chain) { return pins_leave_a_split(chain) && smallest_memory_growth(chain) == 0; }

TEST(Contiguous, EqualsExhaustiveSearchOn2000RandomChains) {
  std::mt19937 random(1);
  int num_infeasible = 0, num_shorter = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const Chain chain = random_chain(random, {});
    const auto expected = split_exhaustively(chain);
    if (!expected) {
      ++num_infeasible;
      EXPECT_FALSE(has_split(chain)) << "trial " << trial;
      continue;
    }
    const ChainSplit split = split_chain(chain);
    const std::vector<int> cuts(split.cuts.begin(), split.cuts.begin() + split.num_used_stages + 1);
    ASSERT_EQ(split.num_used_stages, expected->num_used_stages) << "trial " << trial;
    ASSERT_EQ(split.slowest_stage_us, expected->slowest_stage_us) << "trial " << trial;
    ASSERT_EQ(cuts, expected->cuts) << "trial " << trial;
    num_shorter += split.num_used_stages < chain.num_stages();
  }
  EXPECT_GT(num_infeasible, 100);  // the trials must contain what they are about
  EXPECT_LT(num_infeasible, 1000);
  EXPECT_GT(num_shorter, 100);
}

/// A value that several stages read costs its own stage a message for each of them, which depends on
/// all cuts: the split may miss the optimum, and says by how much at most.
TEST(Contiguous, ValuesReadOnSeveralStagesAreWithinTheirBoundAndNearlyAlwaysOptimal) {
  std::mt19937 random(8);
  int num_trials = 0, num_optimal = 0, num_proven = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    const Chain chain = random_chain(random, {.max_operators = 12, .most_readers = 4});
    const auto expected = split_exhaustively(chain);
    if (!expected) continue;
    const ChainSplit split = split_chain(chain);
    ASSERT_EQ(split.slowest_stage_us, slowest_of(chain, split)) << "trial " << trial;
    ASSERT_EQ(split.least_us, split_by_table(chain)->slowest_stage_us) << "trial " << trial;
    ASSERT_GE(expected->slowest_stage_us, split.least_us) << "trial " << trial;
    ASSERT_LE(split.slowest_stage_us, 1.15 * expected->slowest_stage_us) << "trial " << trial;
    ++num_trials;
    num_optimal += split.slowest_stage_us == expected->slowest_stage_us;
    num_proven += split.slowest_stage_us == split.least_us;
  }
  EXPECT_GT(num_trials, 600);
  EXPECT_GT(num_optimal, num_trials * 99 / 100);
  EXPECT_GT(num_proven, num_trials * 9 / 10);
}

TEST(Contiguous, EqualsTheQuadraticTableOn2000LongerChains) {
  std::mt19937 random(2);
  int num_solved = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const Chain chain = random_chain(random, {.max_operators = 40, .max_stages = 12});
    const auto expected = split_by_table(chain);
    if (!expected) {
      EXPECT_FALSE(has_split(chain)) << "trial " << trial;
      continue;
    }
    ++num_solved;
    const ChainSplit split = split_chain(chain);
    ASSERT_EQ(split.num_used_stages, expected->num_used_stages) << "trial " << trial;
    ASSERT_EQ(split.slowest_stage_us, expected->slowest_stage_us) << "trial " << trial;
    ASSERT_EQ(slowest_of(chain, split), split.slowest_stage_us) << "trial " << trial;
  }
  EXPECT_GT(num_solved, 800);
}

TEST(Contiguous, FractionalTimesAgreeWithTheTableToRounding) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> us(0, 10);
  for (int trial = 0; trial < 300; ++trial) {
    Chain chain = random_chain(random, {.max_operators = 40, .max_stages = 8});
    for (double& time_us : chain.time_us) time_us = us(random);
    for (Crossing& crossing : chain.crossings) crossing.us = us(random);
    const auto expected = split_by_table(chain);
    if (!expected) continue;
    EXPECT_NEAR(split_chain(chain).slowest_stage_us, expected->slowest_stage_us, 1e-9);
  }
}

TEST(Contiguous, NoTrafficNoLimitsFillsEveryStage) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 300; ++trial) {
    const Chain chain = random_chain(random, {.max_operators = 60,
                                              .max_stages = 60,
                                              .has_traffic = false,
                                              .has_forbidden_cuts = false,
                                              .has_pins = false,
                                              .has_memory_limits = false});
    const ChainSplit split = split_chain(chain);
    EXPECT_EQ(split.num_used_stages, std::min(chain.num_operators(), chain.num_stages()));
    ASSERT_EQ(split.cuts.size(), chain.stages.size() + 1);
    EXPECT_EQ(split.cuts.front(), 0);
    EXPECT_EQ(split.cuts.back(), chain.num_operators());
    for (int s = 0; s < split.num_used_stages; ++s) EXPECT_LT(split.cuts[s], split.cuts[s + 1]);
    for (int s = split.num_used_stages; s < chain.num_stages(); ++s) {
      EXPECT_EQ(split.cuts[s], chain.num_operators());
    }
    EXPECT_GE(split.slowest_stage_us, lower_bound_us(chain) - 1e-9);
  }
}

TEST(Contiguous, MoreTrafficNeverMakesTheSlowestStageFaster) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 300; ++trial) {
    Chain chain = random_chain(random, {.max_operators = 30, .has_pins = false, .has_memory_limits = false});
    const double before_us = split_chain(chain).slowest_stage_us;
    for (Crossing& crossing : chain.crossings) crossing.us += crossing.made_at % 3;
    EXPECT_GE(split_chain(chain).slowest_stage_us, before_us);
  }
}

TEST(Contiguous, EqualTimesSplitEvenly) {
  const Chain chain = plain_chain(std::vector<double>(12, 1.5), 4);
  const ChainSplit split = split_chain(chain);
  EXPECT_EQ(split.cuts, (std::vector<int>{0, 3, 6, 9, 12}));
  EXPECT_EQ(split.slowest_stage_us, 4.5);
  EXPECT_EQ(lower_bound_us(chain), 4.5);
}

TEST(Contiguous, HeavyOperatorBoundsTheStage) {
  const Chain chain = plain_chain({1, 1, 50, 1, 1, 1}, 3);
  const ChainSplit split = split_chain(chain);
  EXPECT_EQ(split.slowest_stage_us, 50);
  EXPECT_EQ(lower_bound_us(chain), 50);
}

TEST(Contiguous, AllZeroTimesStillFillEveryStage) {
  const ChainSplit split = split_chain(plain_chain(std::vector<double>(7, 0), 3));
  EXPECT_EQ(split.num_used_stages, 3);
  EXPECT_EQ(split.slowest_stage_us, 0);
}

TEST(Contiguous, EquallyFastCutsTakeTheLeastTraffic) {
  Chain chain = plain_chain({9, 1, 1, 1, 9}, 2);
  chain.crossings = {{0, {1}, 3}, {1, {2}, 1}, {2, {3}, 1}, {3, {4}, 3}};
  EXPECT_EQ(split_chain(chain).cuts, (std::vector<int>{0, 2, 5}));
}

TEST(Contiguous, MemoryMovesTheCut) {
  Chain chain = plain_chain({1, 1, 1, 1}, 2);
  chain.fixed_bytes = {10, 10, 10, 10};
  chain.activation_bytes = {5, 5, 5, 5};
  chain.stages = {{2, 25}, {1, 100}};
  EXPECT_EQ(split_chain(chain).cuts, (std::vector<int>{0, 1, 4}));
}

TEST(Contiguous, TooLittleMemoryIsTheSmallestGrowthShort) {
  std::mt19937 random(6);
  int num_refused = 0;
  for (int trial = 0; trial < 300; ++trial) {
    Chain chain = random_chain(random, {.max_operators = 20, .has_pins = false, .has_memory_limits = false});
    for (auto& bytes : chain.fixed_bytes) bytes = 1 + static_cast<int64_t>(random() % 50);
    for (auto& bytes : chain.activation_bytes) bytes = 1 + static_cast<int64_t>(random() % 9);
    for (auto& limits : chain.stages) limits = {2, 20};
    const int64_t missing = smallest_memory_growth(chain);
    if (missing == 0) continue;
    ++num_refused;
    for (auto& limits : chain.stages) limits.memory_bytes += missing;
    EXPECT_TRUE(has_split(chain)) << "trial " << trial;
    for (auto& limits : chain.stages) --limits.memory_bytes;
    EXPECT_FALSE(has_split(chain)) << "trial " << trial;
  }
  EXPECT_GT(num_refused, 100);
}

TEST(Contiguous, PinsAgainstTheOrderLeaveNoSplit) {
  Chain chain = plain_chain({1, 1, 1}, 2);
  chain.first_stage = {1, 0, 0};
  chain.last_stage = {1, 1, 0};
  EXPECT_FALSE(has_split(chain));
}

TEST(Contiguous, PinsInsideOneBlockThatDisagreeLeaveNoSplit) {
  Chain chain = plain_chain({1, 1, 1}, 2);
  chain.cut_allowed = {1, 1, 0, 1};
  chain.first_stage = {0, 0, 1};
  chain.last_stage = {1, 0, 1};
  EXPECT_FALSE(has_split(chain));
}

TEST(Contiguous, VectorsOfDifferentLengthAreRefused) {
  Chain chain = plain_chain({1, 1, 1}, 2);
  chain.cut_allowed.pop_back();
  EXPECT_THROW(split_chain(chain), c10::Error);
}

TEST(Contiguous, SameInputGivesTheSameCuts) {
  std::mt19937 random(7);
  const Chain chain =
      random_chain(random, {.max_operators = 200, .max_stages = 30, .has_pins = false, .has_memory_limits = false});
  EXPECT_EQ(split_chain(chain).cuts, split_chain(chain).cuts);
}

}  // namespace
}  // namespace smp::partitioner
