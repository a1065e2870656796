// The recorder of one rank, and the common clock.
#include "runtime/executor/timeline.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "runtime/exchange/common_clock.h"
#include "tests/support/counted_memory.h"
#include "tests/support/loopback_world.h"

namespace smp::runtime {
namespace {

using partitioner::Action;
using partitioner::ActionKind;
using partitioner::Activity;
using partitioner::RankStep;
using Phase = TimelineRecorder::Phase;

constexpr Action kForward{ActionKind::kForward, 1, 2, -1};
constexpr Action kSend{ActionKind::kSendActivation, 1, 2, 3};

// As a step on a leader, with so many actions.
bool run_step(TimelineRecorder& recorder, int64_t number, int num_actions = 2, bool counts = true) {
  recorder.begin_step();
  {
    const RecordedRound round(&recorder, /*leads=*/true);
    for (int i = 0; i < num_actions; ++i) const RecordedSpan span(&recorder, i % 2 == 0 ? kForward : kSend);
    const RecordedSpan span(&recorder, Activity::kResults);
  }
  if (counts) recorder.count_step(number, /*trains=*/true);
  return recorder.end_step();
}

TEST(TimelineRecorder, KeepsTheStepsBehindTheWarmUp) {
  TimelineRecorder recorder(2, 3);
  EXPECT_FALSE(run_step(recorder, 0));
  EXPECT_EQ(recorder.phase(), Phase::kWarmsUp);
  EXPECT_TRUE(run_step(recorder, 1));
  EXPECT_EQ(recorder.phase(), Phase::kRecords);
  EXPECT_FALSE(run_step(recorder, 2));
  EXPECT_FALSE(run_step(recorder, 3));
  EXPECT_TRUE(run_step(recorder, 4));
  EXPECT_EQ(recorder.phase(), Phase::kIsFull);
  const std::vector<RankStep> steps = recorder.steps();
  ASSERT_EQ(steps.size(), 3U);
  EXPECT_EQ(steps[0].number, 2);
  EXPECT_EQ(steps[2].number, 4);
}

TEST(TimelineRecorder, SpansFollowOneAnotherWithinTheirStep) {
  TimelineRecorder recorder(1, 2);
  for (int64_t number = 0; number < 3; ++number) run_step(recorder, number);
  for (const RankStep& step : recorder.steps()) {
    ASSERT_EQ(step.spans.size(), 4U);
    EXPECT_EQ(step.spans[0].activity, Activity::kBody);
    EXPECT_EQ(step.spans[1].action, kForward);
    EXPECT_EQ(step.spans[2].action, kSend);
    EXPECT_EQ(step.spans[3].activity, Activity::kResults);
    EXPECT_TRUE(step.trains);
    int64_t now_ns = step.start_ns;
    for (const auto& span : step.spans) {
      EXPECT_GE(span.start_ns, now_ns);
      EXPECT_GE(span.end_ns, span.start_ns);
      now_ns = span.end_ns;
    }
    EXPECT_GE(step.end_ns, now_ns);
  }
}

TEST(TimelineRecorder, AllocatesNothingForStepsLikeThoseOfTheWarmUp) {
  constexpr int kNumActions = 1000, kNumSteps = 50;
  TimelineRecorder recorder(1, kNumSteps);
  run_step(recorder, 0, kNumActions);
  const int64_t asked_for = support::bytes_asked_for([&] {
    for (int64_t number = 1; number < kNumSteps; ++number) run_step(recorder, number, kNumActions);
  });
  EXPECT_EQ(asked_for, 0);
  EXPECT_EQ(recorder.steps().size(), static_cast<size_t>(kNumSteps - 1));
}

TEST(TimelineRecorder, ForgetsStepsThatAreRefused) {
  TimelineRecorder recorder(1, 2);
  run_step(recorder, 0);
  run_step(recorder, 1, 2, /*counts=*/false);
  run_step(recorder, 1, 4);
  recorder.begin_step();  // and one that throws
  const auto steps = recorder.steps();
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].spans.size(), 6U);
}

TEST(TimelineRecorder, NullRecordsNothing) {
  const RecordedSpan span(nullptr, kForward);
  const RecordedRound round(nullptr, true);
}

TEST(CommonClock, TakesTheMiddleOfTheShortestRoundTrip) {
  EXPECT_EQ(clock_offset_ns({{100, 5200, 300}, {400, 5410, 420}, {500, 5600, 700}}), 5000);
  EXPECT_EQ(clock_offset_ns({{1000, 4, 1010}}), -1001);
}

TEST(CommonClock, TakesClocksForOneWhereAllRoundTripsAllowIt) {
  EXPECT_EQ(clock_offset_ns({{100, 109, 110}, {200, 201, 230}}), 0);
  EXPECT_EQ(clock_offset_ns({{100, 109, 110}, {200, 235, 230}}), 4);
}

TEST(CommonClock, SharesTheDriftOutEvenly) {
  const ClockReading first{1000, 50}, last{2000, 70};
  EXPECT_EQ(on_common_clock(1000, first, last), 950);
  EXPECT_EQ(on_common_clock(1500, first, last), 1440);
  EXPECT_EQ(on_common_clock(2000, first, last), 1930);
  EXPECT_EQ(on_common_clock(1500, first, first), 1450);
}

// The bound holds however slow the machine is: rank 0's own looks at its clock tell how long each round trip took.
TEST(CommonClock, IsRightToHalfTheShortestRoundTrip) {
  constexpr std::array<int64_t, 3> kOffsets{0, 1'000'000'000, -7'000'000'000};
  std::array<int64_t, 3> found{}, bound{};
  tests::run_ranks(3, [&](Transport& transport) {
    const auto rank = static_cast<size_t>(transport.rank());
    std::vector<int64_t> looks;
    const ClockReading reading =
        measure_clock(transport, [&] { return looks.emplace_back(steady_now_ns() + kOffsets[rank]); });
    found[rank] = reading.offset_ns;
    if (rank != 0) return;
    const size_t per_rank = (looks.size() - 1) / 2;
    for (size_t i = 0; i + 1 < looks.size(); i += 2) {
      int64_t& least = bound[1 + i / per_rank];
      const int64_t took = looks[i + 1] - looks[i];
      least = least == 0 ? took : std::min(least, took);
    }
  });
  EXPECT_EQ(found[0], 0);
  for (size_t rank : {1, 2}) EXPECT_LE(std::abs(found[rank] - kOffsets[rank]), bound[rank] / 2 + 1) << "rank " << rank;
}

}  // namespace
}  // namespace smp::runtime
