// Idle time by cause, against attributions made by hand.
#include "partitioner/report/idle_time.h"

#include <gtest/gtest.h>

#include <numeric>

#include "partitioner/report/typical_step.h"
#include "tests/support/schedule_text.h"
#include "tests/unit/partitioner/report/timelines.h"

namespace smp::partitioner {
namespace {

using testing::span;
using testing::two_ranks;
using enum Cause;
using enum Activity;
using enum ActionKind;

StepAttribution attribution_of(const PipelineStep& step) { return attribute(step, performed_schedule(step).value()); }

int64_t ns_of(const StepAttribution& attribution, size_t rank, Cause cause) {
  return attribution.ns_of_cause[rank][static_cast<size_t>(cause)];
}

void expect_filled(const StepAttribution& attribution) {
  for (size_t rank = 0; rank < attribution.ranks.size(); ++rank) {
    int64_t now_ns = attribution.start_ns;
    for (const CausedTime& piece : attribution.ranks[rank]) {
      EXPECT_EQ(piece.start_ns, now_ns) << "rank " << rank;
      EXPECT_GT(piece.end_ns, piece.start_ns) << "rank " << rank;
      now_ns = piece.end_ns;
    }
    EXPECT_EQ(now_ns, attribution.end_ns) << "rank " << rank;
    const auto& sums = attribution.ns_of_cause[rank];
    EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), int64_t{0}), attribution.num_ns()) << "rank " << rank;
  }
}

TEST(IdleTime, WaitsForWorkAreDependencyAndForMessagesCommunication) {
  const StepAttribution attribution = attribution_of(two_ranks());
  expect_filled(attribution);
  EXPECT_EQ(attribution.end_ns, 78);
  const std::vector<CausedTime> first{{kHost, 0, 10},           {kCompute, 10, 20},       {kCommunication, 20, 21},
                                      {kCommunication, 21, 25},  // rank 1 waits for its message
                                      {kDependency, 25, 50},    {kCommunication, 50, 60}, {kCompute, 60, 75},
                                      {kCommunication, 75, 76}, {kHost, 76, 77},          {kCommunication, 77, 78}};
  const std::vector<CausedTime> second{{kHost, 0, 2},
                                       {kHost, 2, 12},
                                       {kDependency, 12, 20},
                                       {kCommunication, 20, 25},
                                       {kCompute, 25, 35},
                                       {kCompute, 35, 50},
                                       {kCommunication, 50, 52},
                                       {kCommunication, 52, 60},  // rank 0 still receives
                                       {kDependency, 60, 75},
                                       {kCommunication, 75, 78}};
  EXPECT_EQ(attribution.ranks[0], first);
  EXPECT_EQ(attribution.ranks[1], second);
  EXPECT_DOUBLE_EQ(attribution.bubble(), 1 - 25.0 / 78);
}

// Rank 1's forward takes 30 instead of 10: on balanced ranks both take 20, and rank 0 waits 20 + 15.
TEST(IdleTime, WorkBeyondABalancedPipelineIsImbalance) {
  const StepAttribution attribution = attribution_of(two_ranks(/*late_ns=*/20));
  expect_filled(attribution);
  EXPECT_EQ(ns_of(attribution, 0, kDependency), 20 + 15);
  EXPECT_EQ(ns_of(attribution, 0, kImbalance), 30 + 15 - 35);
  EXPECT_EQ(ns_of(attribution, 1, kImbalance), 0);
}

TEST(IdleTime, WaitForARankThatDoesNothingIsTheHosts) {
  const StepAttribution attribution = attribution_of(two_ranks(/*late_ns=*/0, /*pause_ns=*/5));
  expect_filled(attribution);
  const StepAttribution without = attribution_of(two_ranks());
  for (size_t rank : {0, 1}) {
    EXPECT_EQ(ns_of(attribution, rank, kHost), ns_of(without, rank, kHost) + 5);
    EXPECT_EQ(ns_of(attribution, rank, kDependency), ns_of(without, rank, kDependency));
  }
}

TEST(IdleTime, SumsUpWhereClocksAreWrong) {
  for (const int64_t error_ns : {-100, -30, 30, 100}) {
    PipelineStep step = two_ranks();
    step[1].start_ns += error_ns;
    step[1].end_ns += error_ns;
    for (Span& one : step[1].spans) one.start_ns += error_ns, one.end_ns += error_ns;
    expect_filled(attribution_of(step));
  }
}

TEST(IdleTime, RankWithoutStageWaitsForAll) {
  PipelineStep step = two_ranks();
  step.push_back(
      {.number = 7, .trains = true, .start_ns = 0, .end_ns = 78, .spans = {span(kMessage, 0, 12), span(kResults, 12, 78)}});
  const StepAttribution attribution = attribution_of(step);
  expect_filled(attribution);
  EXPECT_EQ(ns_of(attribution, 2, kCompute), 0);
  EXPECT_GT(ns_of(attribution, 2, kDependency), 0);
}

TEST(PerformedSchedule, IsTheTableOfTheStep) {
  const std::optional<Schedule> schedule = performed_schedule(two_ranks());
  ASSERT_TRUE(schedule);
  EXPECT_EQ(support::to_table(*schedule), "stage 0 | F0 B0\nstage 1 | F0 B0\n");
  EXPECT_EQ(schedule->num_microbatches, 1);
}

TEST(PerformedSchedule, IsNoneWhereAnActionRanTwiceOrAMessageHasNoEnd) {
  PipelineStep twice = two_ranks();
  twice[0].spans.insert(twice[0].spans.begin() + 2, twice[0].spans[1]);
  EXPECT_FALSE(performed_schedule(twice));
  PipelineStep unsent = two_ranks();
  unsent[0].spans.erase(unsent[0].spans.begin() + 2);
  EXPECT_FALSE(performed_schedule(unsent));
  PipelineStep lost = two_ranks();
  lost[1].spans.erase(lost[1].spans.begin() + 1);
  EXPECT_FALSE(performed_schedule(lost));
  EXPECT_FALSE(performed_schedule({RankStep{}, RankStep{}}));
}

TEST(TypicalStep, IsTheMedianOfTheMostFrequentTable) {
  PipelineStep evaluation = two_ranks();
  for (RankStep& rank : evaluation) {
    std::erase_if(rank.spans, [](const Span& one) { return one.is_action() && !one.action.is_forward(); });
  }
  const auto record = testing::record_of({evaluation, two_ranks(30), two_ranks(10), two_ranks(20)});
  EXPECT_EQ(typical_step(record, 0), 3U);
  EXPECT_EQ(typical_step(testing::record_of({evaluation, two_ranks(30)}), 0), 1U);
  EXPECT_EQ(typical_step(record, 1), std::nullopt);
}

TEST(IdleTable, HasARowPerRankAndATotal) {
  EXPECT_EQ(idle_table(attribution_of(two_ranks())),
            "rank |          compute |       dependency |       imbalance |    communication |             host\n"
            "   0 | 32.1 % (0.03 us) | 32.1 % (0.03 us) | 0.0 % (0.00 us) | 21.8 % (0.02 us) | 14.1 % (0.01 us)\n"
            "   1 | 32.1 % (0.03 us) | 29.5 % (0.02 us) | 0.0 % (0.00 us) | 23.1 % (0.02 us) | 15.4 % (0.01 us)\n"
            " all | 32.1 % (0.05 us) | 30.8 % (0.05 us) | 0.0 % (0.00 us) | 22.4 % (0.04 us) | 14.7 % (0.02 us)\n");
}

}  // namespace
}  // namespace smp::partitioner
