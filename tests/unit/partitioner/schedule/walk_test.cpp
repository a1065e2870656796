// Tables whose sends wait for their receivers: which ones end.
#include "partitioner/schedule/walk.h"

#include <gtest/gtest.h>

#include "tests/support/schedule_text.h"
#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

using enum ActionKind;

TEST(SendLimits, AreOneMoreThanTheStageHolds) {
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, testing::chain(4), 9);
  EXPECT_EQ(schedule.send_limit({kSendActivation, 0, 0, 1}), 4 + 1);
  EXPECT_EQ(schedule.send_limit({kSendActivation, 2, 0, 3}), 2 + 1);
  EXPECT_EQ(schedule.send_limit({kSendGradient, 3, 0, 2}), 2 + 1);
  EXPECT_EQ(schedule.send_limit({kSendActivation, kInputStage, 0, 3}), 4 + 1);
}

TEST(SendLimits, HoldForTrainingAndEvaluationOnChains) {
  for (const ScheduleKind kind : {ScheduleKind::kSimple, ScheduleKind::kInterleaved}) {
    for (const bool has_backward : {true, false}) {
      for (int stages = 1; stages <= 8; ++stages) {
        const Schedule schedule = generate({kind}, testing::chain(stages, has_backward), 20);
        EXPECT_TRUE(may_limit_sends(schedule)) << support::to_table(schedule);
      }
    }
  }
}

TEST(SendLimits, AreRefusedWhereTwoRanksWouldWaitForEachOther) {
  // Each rank sends three messages before it comes to its first receive, and two may be under way.
  Schedule schedule;
  schedule.num_ranks = 2;
  schedule.num_microbatches = 3;
  schedule.in_flight_limits = {1, 1};
  schedule.columns.resize(2);
  for (const bool receives : {false, true}) {
    for (int m = 0; m < 3; ++m) {
      schedule.columns[0].push_back({receives ? kReceiveGradient : kSendActivation, 0, m, 1});
      schedule.columns[1].push_back({receives ? kReceiveActivation : kSendGradient, 1, m, 0});
    }
  }
  EXPECT_FALSE(may_limit_sends(schedule));
  schedule.in_flight_limits = {2, 2};
  EXPECT_TRUE(may_limit_sends(schedule));
}

}  // namespace
}  // namespace smp::partitioner
