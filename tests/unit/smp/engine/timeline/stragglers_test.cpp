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
  return {.computing_ns = static_cast<int64_t>(computing_ms * 1e6),
          .step_ns = 100'000'000,
          .between_ns = static_cast<int64_t>(between_ms * 1e6),
          .process = "pid 7 on host a"};
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

TEST(Stragglers, AreToldOnceBehindTheirSecondSpan) {
  Stragglers stragglers(kPipelineRanks, 0);
  const std::vector<Pace> well{of(40), of(60), of(41), of(59)}, slow{of(40), of(60), of(80), of(59)};
  EXPECT_EQ(lines_of(stragglers, well, 3).size(), 0);
  EXPECT_EQ(lines_of(stragglers, slow, 1).size(), 0);
  const auto lines = lines_of(stragglers, slow, 1);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_TRUE(contains(lines[0],
                       "straggler: rank 2 (pid 7 on host a) computes for 0.0800 s in each step, 2.0 times as long "
                       "as the same stages take on other replicas"))
      << lines[0];
  EXPECT_EQ(lines_of(stragglers, slow, 9).size(), 0);
  EXPECT_EQ(lines_of(stragglers, well, 1).size(), 0);
  EXPECT_EQ(lines_of(stragglers, slow, 2).size(), 1);
}

TEST(Stragglers, WithoutReplicasARankIsComparedWithItselfBefore) {
  Stragglers stragglers({0, 1, 2}, 0);
  std::vector<Pace> paces{of(40), of(60), of(50)};
  paces[1].slowdown = 2.1;
  const auto lines = lines_of(stragglers, paces, 2);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_TRUE(contains(lines[0],
                       "rank 1 (pid 7 on host a) computes for 0.0600 s in each step, 2.1 times as long as it did "
                       "before, unlike other ranks"))
      << lines[0];
}

TEST(Stragglers, AreNotThoseOfLargerBatchesOnAllRanks) {
  Stragglers stragglers({0, 1, 2}, 0);
  std::vector<Pace> paces{of(40), of(60), of(50)};
  for (Pace& pace : paces) pace.slowdown = 3;
  EXPECT_EQ(lines_of(stragglers, paces, 5).size(), 0);
}

TEST(Stragglers, AreNotThoseForWhomNobodyWaitsLong) {
  Stragglers stragglers(kPipelineRanks, 0);
  EXPECT_EQ(lines_of(stragglers, {of(10), of(10), of(30), of(10)}, 5).size(), 0);  // 20 ms of 101
  EXPECT_EQ(lines_of(stragglers, {of(10), of(10), of(40), of(10)}, 5).size(), 1);
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

TEST(Stragglers, AreThoseWhoseProgramTakesLongBetweenSteps) {
  Stragglers stragglers(kPipelineRanks, 0);
  const auto lines = lines_of(stragglers, {of(40), of(60), of(40), of(60, 50)}, 4);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_TRUE(
      contains(lines[0], "rank 3 (pid 7 on host a) spends 0.0500 s outside of smp between two steps, others 0.0010 s"))
      << lines[0];
}

// It runs no stages.
TEST(Stragglers, AReplicaThatHasJoinedIsNotComparedWith) {
  Stragglers stragglers({0, 0}, 0);
  EXPECT_EQ(lines_of(stragglers, {of(40), of(0)}, 3).size(), 0);
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
      recorder.begin_step(now_ns + draw(10));
      recorder.add(draw(40), 1, now_ns + 200);
      recorder.end_step(now_ns + 200);
      if (step % Stragglers::kWindow == 0) paces.push_back(recorder.take());
    }
    now_ns += 200;
    if (!paces.empty()) {
      EXPECT_EQ(lines_of(stragglers, paces, 1), std::vector<std::string>()) << "after step " << step;
    }
  }
}

TEST(PaceRecorder, TakesTheFastestOfAWindow) {
  PaceRecorder recorder;
  int64_t now_ns = 0;
  const auto step = [&](int64_t computing_ns, int64_t step_ns, int64_t between_ns, uint64_t alike) {
    now_ns += between_ns;
    recorder.begin_step(now_ns);
    now_ns += step_ns;
    recorder.add(computing_ns, alike, now_ns);
    recorder.end_step(now_ns);
  };
  step(5, 10, 0, 1);
  step(4, 9, 3, 1);
  Pace pace = recorder.take();
  EXPECT_EQ(pace.computing_ns, 4);
  EXPECT_EQ(pace.step_ns, 9);
  EXPECT_EQ(pace.between_ns, 0);
  EXPECT_EQ(pace.slowdown, 1);  // steps before were others
  EXPECT_TRUE(contains(pace.process, "pid ")) << pace.process;
  step(6, 10, 2, 1);
  step(8, 10, 3, 1);
  pace = recorder.take();
  EXPECT_EQ(pace.computing_ns, 6);
  EXPECT_EQ(pace.between_ns, 2);
  EXPECT_EQ(pace.slowdown, 1);
  step(9, 10, 2, 1);
  EXPECT_EQ(recorder.take().slowdown, 1.5);
  step(3, 10, 2, 1);
  EXPECT_EQ(recorder.take().slowdown, 1);
  step(9, 10, 2, 1);
  EXPECT_EQ(recorder.take().slowdown, 3);
  step(9, 10, 2, 2);  // of other operators
  EXPECT_EQ(recorder.take().slowdown, 1);
  step(18, 10, 2, 2);
  EXPECT_EQ(recorder.take().slowdown, 1);
  step(36, 10, 2, 2);
  EXPECT_EQ(recorder.take().slowdown, 2);
}

TEST(PaceRecorder, AStepThatRanNothingLeavesNothingToCompare) {
  PaceRecorder recorder;
  recorder.add(5, 1);
  recorder.add(0, 1);
  EXPECT_EQ(recorder.take().computing_ns, 0);
}

}  // namespace
}  // namespace smp::engine
