// Which ranks count as stragglers, of times that are given.
#include "smp/engine/timeline/stragglers.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/support/messages.h"

namespace smp::engine {
namespace {

using support::contains;

// Two replicas of two stages, of which the second has more to do.
const std::vector<int> kPipelineRanks{0, 1, 0, 1};

Pace of(double computing_ms, double between_ms = 1) {
  Pace pace{.period_ns = 100'000'000, .has_run = true, .process = "pid 7 on host a"};
  pace.sections[Pace::kComputing].ns = static_cast<int64_t>(computing_ms * 1e6);
  pace.sections[Pace::kBetween].ns = static_cast<int64_t>(between_ms * 1e6);
  return pace;
}

// All lines of a number of spans, each of which is a window.
std::vector<std::string> lines_of(Stragglers& stragglers, const std::vector<Pace>& paces, int spans) {
  static int64_t now_ns = 0;
  std::vector<std::string> all;
  for (int i = 0; i < spans; ++i) {
    for (std::string& line : stragglers.end_window(paces, now_ns += Stragglers::kSpanNs)) all.push_back(std::move(line));
  }
  return all;
}

TEST(Stragglers, AreToldBehindTheirSecondSpanAndAgainOnlyAfterTwiceAsMany) {
  Stragglers stragglers(kPipelineRanks, 0);
  const std::vector<Pace> well{of(40), of(60), of(41), of(59)}, slow{of(40), of(60), of(80), of(59)};
  EXPECT_EQ(lines_of(stragglers, well, 3).size(), 0);
  EXPECT_EQ(lines_of(stragglers, slow, 1).size(), 0);
  const auto lines = lines_of(stragglers, slow, 1);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_TRUE(contains(lines[0],
                       "straggler: rank 2 (pid 7 on host a) computes for 0.0800 s in a step, 2.0 times as long as "
                       "its like on other replicas"))
      << lines[0];
  EXPECT_EQ(lines_of(stragglers, slow, 1).size(), 0);
  EXPECT_EQ(lines_of(stragglers, slow, 1).size(), 1);  // four on end
  EXPECT_EQ(lines_of(stragglers, well, 1).size(), 0);
  EXPECT_EQ(lines_of(stragglers, slow, 7).size(), 0);
  EXPECT_EQ(lines_of(stragglers, slow, 1).size(), 1);
  EXPECT_EQ(lines_of(stragglers, well, 16).size(), 0);  // long enough to begin anew
  EXPECT_EQ(lines_of(stragglers, slow, 2).size(), 1);
}

TEST(Stragglers, WithoutReplicasARankIsComparedWithItselfBefore) {
  Stragglers stragglers({0, 1, 2}, 0);
  std::vector<Pace> paces{of(40), of(60), of(50)};
  paces[1].sections[Pace::kComputing].slowdown = 2.1;
  const auto lines = lines_of(stragglers, paces, 2);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_TRUE(contains(lines[0],
                       "rank 1 (pid 7 on host a) computes for 0.0600 s in a step, 2.1 times as long as it did "
                       "before, unlike other ranks"))
      << lines[0];
}

TEST(Stragglers, AreNotThoseOfLargerBatchesOnAllRanks) {
  Stragglers stragglers({0, 1, 2}, 0);
  std::vector<Pace> paces{of(40), of(60), of(50)};
  for (Pace& pace : paces) pace.sections[Pace::kComputing].slowdown = 3;
  EXPECT_EQ(lines_of(stragglers, paces, 5).size(), 0);
}

TEST(Stragglers, AreNotThoseForWhomNobodyWaitsLong) {
  Stragglers stragglers(kPipelineRanks, 0);
  EXPECT_EQ(lines_of(stragglers, {of(10), of(10), of(30), of(10)}, 3).size(), 0);  // 20 ms of 100
  EXPECT_EQ(lines_of(stragglers, {of(10), of(10), of(40), of(10)}, 3).size(), 1);
}

TEST(Stragglers, AreNotThoseOfLessThanASecond) {
  Stragglers stragglers({0, 0}, 0);
  const std::vector<Pace> slow{of(40), of(80)}, well{of(40), of(40)};
  int64_t now_ns = 0;
  const auto lines = [&](const std::vector<Pace>& paces, int64_t ns) {
    return stragglers.end_window(paces, now_ns += ns).size();
  };
  for (int span = 0; span < 5; ++span) {
    for (int window = 0; window < 9; ++window) EXPECT_EQ(lines(slow, Stragglers::kSpanNs / 10), 0);
    EXPECT_EQ(lines(well, Stragglers::kSpanNs / 10), 0);
  }
  size_t found = 0;
  for (int window = 0; window < 30; ++window) found += lines(slow, Stragglers::kSpanNs / 10);
  EXPECT_EQ(found, 1);
}

TEST(Stragglers, OfTwoRanksEitherMayBeOne) {
  for (const size_t slow : {0, 1}) {
    Stragglers stragglers({0, 0}, 0);
    std::vector<Pace> paces{of(40), of(40)};
    paces[slow] = of(80);
    const auto lines = lines_of(stragglers, paces, 2);
    ASSERT_EQ(lines.size(), 1);
    EXPECT_TRUE(contains(lines[0], "rank " + std::to_string(slow))) << lines[0];
  }
}

TEST(Stragglers, OfThreeAreNotTheTwoThatHaveMoreToDoThanTheThird) {
  Stragglers stragglers({0, 0, 0}, 0);
  EXPECT_EQ(lines_of(stragglers, {of(20), of(60), of(60)}, 3).size(), 0);
}

TEST(Stragglers, AreThoseWhoseProgramTakesLongBetweenSteps) {
  Stragglers stragglers(kPipelineRanks, 0);
  const auto lines = lines_of(stragglers, {of(40), of(60), of(40), of(60, 50)}, 2);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_TRUE(contains(lines[0],
                       "rank 3 (pid 7 on host a) takes 0.0500 s from the end of a step to the next, 50.0 times as "
                       "long as its like on other replicas"))
      << lines[0];
}

// One has more weights to update, or the others' data to load.
TEST(Stragglers, AreNotThoseWhoseStageHasMoreToDoBetweenSteps) {
  Stragglers stragglers({0, 1}, 0);
  EXPECT_EQ(lines_of(stragglers, {of(40, 50), of(60, 1)}, 3).size(), 0);
}

// It runs no stages, and takes no time between steps that it has not.
TEST(Stragglers, AReplicaWithoutABatchIsNotComparedWith) {
  Stragglers stragglers({0, 0}, 0);
  Pace joined = of(0.1, 0.1);
  joined.has_run = false;
  EXPECT_EQ(lines_of(stragglers, {of(40, 50), joined}, 3).size(), 0);
}

// Three steps of ten take a rank three times as long, as beside other programs.
TEST(Stragglers, AreNotThoseOfNoise) {
  Stragglers stragglers(kPipelineRanks, 0);
  std::vector<PaceRecorder> recorders(kPipelineRanks.size());
  std::mt19937 random(3);
  std::bernoulli_distribution is_slow(0.3);
  const auto draw = [&](int64_t ns) { return is_slow(random) ? 3 * ns : ns; };
  int64_t now_ns = 0;
  for (uint64_t step = 1; step <= 10 * 1000; ++step) {
    std::vector<Pace> paces;
    for (PaceRecorder& recorder : recorders) {
      recorder.begin_step(0, now_ns + draw(60));
      recorder.add(draw(60), 1, now_ns + 200);
      recorder.end_step(0, now_ns + 200);
      if (step % Stragglers::kWindow == 0) paces.push_back(recorder.take());
    }
    now_ns += 200;
    if (!paces.empty()) {
      EXPECT_EQ(lines_of(stragglers, paces, 1), std::vector<std::string>()) << "after step " << step;
    }
  }
}

class Recorded : public testing::Test {
 protected:
  void step(int64_t computing_ns, int64_t step_ns, int64_t between_ns, std::optional<uint64_t> alike = 1) {
    now_ns_ += between_ns;
    recorder_.begin_step(in_calls_ns_, now_ns_);
    now_ns_ += step_ns;
    in_calls_ns_ += step_ns;  // it is one
    recorder_.add(computing_ns, alike, now_ns_);
    recorder_.end_step(in_calls_ns_, now_ns_);
  }
  double slowdown(Pace::Section section = Pace::kComputing) { return recorder_.take().sections[section].slowdown; }

  PaceRecorder recorder_;
  int64_t now_ns_ = 0, in_calls_ns_ = 0;
};

TEST_F(Recorded, TheFastestOfAWindowCounts) {
  step(6, 10, 2);
  step(8, 9, 3);
  recorder_.take();
  step(5, 10, 4);
  step(4, 9, 3);
  const Pace pace = recorder_.take();
  EXPECT_EQ(pace.sections[Pace::kComputing].ns, 4);
  EXPECT_EQ(pace.sections[Pace::kBetween].ns, 3);
  EXPECT_EQ(pace.period_ns, 12);
  EXPECT_TRUE(pace.has_run && contains(pace.process, "pid ")) << pace.process;
}

TEST_F(Recorded, SlowdownIsOfStepsThatAreAlike) {
  step(6, 10, 2);
  EXPECT_EQ(slowdown(), 1);  // steps before were others
  step(6, 10, 2);
  EXPECT_EQ(slowdown(), 1);
  step(9, 10, 2);
  EXPECT_EQ(slowdown(), 1.5);
  step(3, 10, 2);
  EXPECT_EQ(slowdown(), 1);
  step(9, 10, 2);
  EXPECT_EQ(slowdown(), 3);
  step(9, 10, 6);
  EXPECT_EQ(slowdown(Pace::kBetween), 3);
  step(9, 10, 2, 2);
  EXPECT_EQ(slowdown(), 1);
  step(18, 10, 2, 2);
  EXPECT_EQ(slowdown(), 1);
  step(36, 10, 2, 2);
  EXPECT_EQ(slowdown(), 2);
}

TEST_F(Recorded, CallsWithOtherRanksAreNotBetween) {
  step(6, 10, 2);
  recorder_.take();
  now_ns_ += 50;
  in_calls_ns_ += 50;
  step(6, 10, 2);
  EXPECT_EQ(recorder_.take().sections[Pace::kBetween].ns, 2);
}

TEST_F(Recorded, AStepThatRanNothingIsKnown) {
  step(5, 10, 2);
  step(0, 10, 2, std::nullopt);
  EXPECT_FALSE(recorder_.take().has_run);
}

}  // namespace
}  // namespace smp::engine
