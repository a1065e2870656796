// Every rule of the schedule check, shown on a good table that one change makes bad.
#include "partitioner/schedule/check.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "partitioner/schedule/generate.h"
#include "tests/support/schedule_text.h"
#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

using enum ActionKind;

/// Three stages, four microbatches:
///   rank 0 | inF0>2 F0 F0>1 inF1>2 F1 F1>1 inF2>2 F2 F2>1 <1B0 B0 inF3>2 F3 F3>1 <1B1 B1 <1B2 B2
///   <1B3 B3 rank 1 | <0F0 F0 F0>2 <0F1 F1 F1>2 <2B0 B0 B0>0 <0F2 F2 F2>2 ... rank 2 | <inF0 <1F0
///   F0 B0 B0>1 <inF1 <1F1 F1 B1 B1>1 ...
class ScheduleCheck : public ::testing::Test {
 protected:
  std::vector<Action>& column(int rank) { return schedule_.columns[rank]; }

  void swap(int rank, const Action& one, const Action& other) { std::iter_swap(find(rank, one), find(rank, other)); }
  void remove(int rank, const Action& action) { column(rank).erase(find(rank, action)); }
  void move_to(int rank, const Action& action, int index) {
    remove(rank, action);
    column(rank).insert(column(rank).begin() + index, action);
  }

  void expect_rejected(const std::vector<std::string>& parts) {
    try {
      check(schedule_, graph_);
      FAIL() << "accepted:\n" << support::to_table(schedule_, support::TableContent::kComputeAndTransfers);
    } catch (const c10::ValueError& error) {
      const std::string text = error.what_without_backtrace();
      for (const std::string& part : parts) {
        EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
      }
    }
  }

  StageGraph graph_ = testing::chain(3);
  Schedule schedule_ = generate({ScheduleKind::kInterleaved}, graph_, 4);

 private:
  std::vector<Action>::iterator find(int rank, const Action& action) {
    const auto found = std::find(column(rank).begin(), column(rank).end(), action);
    EXPECT_NE(found, column(rank).end()) << to_string(action);
    return found;
  }
};

TEST_F(ScheduleCheck, GoodTableIsAccepted) { EXPECT_NO_THROW(check(schedule_, graph_)); }

TEST_F(ScheduleCheck, MissingForwardIsNamed) {
  remove(1, {kForward, 1, 2});
  expect_rejected({"rank 1", "expected 1F2, got none"});
}

TEST_F(ScheduleCheck, MissingBackwardIsNamed) {
  remove(0, {kBackward, 0, 3});
  expect_rejected({"rank 0", "expected 0B3, got none"});
}

TEST_F(ScheduleCheck, MissingWeightGradientsAreNamed) {
  remove(0, {kWeightGradient, 0, 3});
  expect_rejected({"rank 0", "expected 0W3, got none"});
}

TEST_F(ScheduleCheck, WeightGradientsBeforeTheirBackwardAreNamed) {
  swap(2, {kBackward, 2, 0}, {kWeightGradient, 2, 0});
  expect_rejected({"(2W0)", "expected after rank 2", "(2B0)"});
}

TEST_F(ScheduleCheck, WeightGradientsOutOfOrderAreNamed) {
  move_to(2, {kWeightGradient, 2, 0}, static_cast<int>(column(2).size()) - 1);
  schedule_.in_flight_limits[2] = 4;
  expect_rejected({"(2W0)", "ascending", "(2W3)"});
}

TEST_F(ScheduleCheck, WeightGradientsMayComeAtTheEnd) {
  schedule_.in_flight_limits[2] = 4;
  for (int m = 0; m < 4; ++m) {
    remove(2, {kWeightGradient, 2, m});
    column(2).push_back({kWeightGradient, 2, m});
  }
  EXPECT_NO_THROW(check(schedule_, graph_));
  EXPECT_EQ(support::to_table(schedule_).substr(support::to_table(schedule_).find("stage 2")),
            "stage 2 | F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3\n");
  schedule_.in_flight_limits[2] = 3;
  expect_rejected({"(2F3)", "at most 3", "stage 2, got 4"});
}

TEST_F(ScheduleCheck, ForwardTwiceIsNamed) {
  column(1).push_back({kForward, 1, 0});
  expect_rejected({"rank 1, position 28 (1F0)", "expected once", "position 1 already"});
}

TEST_F(ScheduleCheck, BackwardOfStageWithoutBackwardIsNamed) {
  graph_ = testing::chain(3, /*has_backward=*/false);
  schedule_ = generate({ScheduleKind::kSimple}, graph_, 4);
  column(2).push_back({kBackward, 2, 0});
  expect_rejected({"rank 2, position 12 (2B0)", "demand"});
}

TEST_F(ScheduleCheck, MicrobatchOutOfRangeIsNamed) {
  column(0).push_back({kForward, 0, 4});
  expect_rejected({"rank 0, position 24 (0F4)", "demand"});
}

TEST_F(ScheduleCheck, StageOutOfRangeIsNamed) {
  column(0).push_back({kForward, 7, 0});
  expect_rejected({"rank 0, position 24 (7F0)", "demand"});
}

TEST_F(ScheduleCheck, ActionOnAnotherRankIsNamed) {
  remove(0, {kForward, 0, 0});
  column(1).insert(column(1).begin(), {kForward, 0, 0});
  expect_rejected({"rank 1, position 0 (0F0)", "expected on rank 0"});
}

TEST_F(ScheduleCheck, TransferWithoutEdgeIsNamed) {
  column(0).push_back({kSendActivation, 0, 0, 2});
  expect_rejected({"rank 0, position 24 (0F0>2)", "demand"});
}

TEST_F(ScheduleCheck, SendWithoutReceiveIsNamed) {
  remove(2, {kReceiveActivation, 2, 1, 1});
  expect_rejected({"rank 2", "expected 2<1F1", "other end of rank 1, position 5 (1F1>2)"});
}

TEST_F(ScheduleCheck, ReceiveWithoutSendIsNamed) {
  remove(1, {kSendGradient, 1, 0, 0});
  expect_rejected({"rank 1", "expected 1B0>0", "other end of rank 0, position 9 (0<1B0)"});
}

TEST_F(ScheduleCheck, LostInputIsNamed) {
  remove(0, {kSendActivation, kInputStage, 0, 2});
  expect_rejected({"rank 0", "expected inF0>2", "rank 2, position 0 (2<inF0)"});
}

TEST_F(ScheduleCheck, SendTwiceIsNamed) {
  column(0).push_back({kSendActivation, 0, 0, 1});
  expect_rejected({"rank 0, position 24 (0F0>1)", "expected once"});
}

TEST_F(ScheduleCheck, ForwardsOutOfOrderAreNamed) {
  swap(0, {kForward, 0, 0}, {kForward, 0, 1});
  expect_rejected({"rank 0, position 4 (0F0)", "ascending", "after rank 0, position 1 (0F1)"});
}

TEST_F(ScheduleCheck, BackwardsOutOfOrderAreNamed) {
  swap(2, {kBackward, 2, 0}, {kBackward, 2, 1});
  expect_rejected({"rank 2, position 9 (2B0)", "ascending", "after rank 2, position 3 (2B1)"});
}

TEST_F(ScheduleCheck, BackwardBeforeItsForwardIsNamed) {
  swap(2, {kForward, 2, 0}, {kBackward, 2, 0});
  expect_rejected({"rank 2, position 2 (2B0)", "expected after rank 2, position 3 (2F0)"});
}

TEST(ScheduleCheckOfPrograms, RanksTakeMicrobatchesOfDifferentProgramsInOrder) {
  StageGraph one = testing::chain(4);
  one.num_ranks = 2;
  one.rank_of_stage = {0, 1, 0, 1};
  const StageGraph other = one;
  const std::vector<const StageGraph*> mixed{&one, &other, &one};
  // In order by stage, which is enough for one program only.
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, one, 3);
  EXPECT_NO_THROW(check(schedule, one));
  try {
    check(schedule, mixed);
    FAIL() << "accepted:\n" << support::to_table(schedule);
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("expected microbatches in ascending order"), std::string::npos) << text;
  }
}

// A stage on autograd adds to parameters in its backward, a taped one of another program in its weight gradients.
TEST(ScheduleCheckOfPrograms, WeightGradientsComeBeforeTheBackwardOfAnotherProgram) {
  const StageGraph one = testing::chain(1), other = one;
  const std::vector<const StageGraph*> mixed{&one, &other};
  Schedule schedule = generate({}, mixed);
  EXPECT_EQ(support::to_table(schedule), "stage 0 | F0 B0 F1 B1\n");
  schedule.in_flight_limits = {2};
  std::vector<Action>& column = schedule.columns[0];
  std::rotate(column.begin() + 2, column.begin() + 3, column.end());
  EXPECT_EQ(support::to_table(schedule), "stage 0 | F0 B0 F1 B1 W0\n") << "W0 is the last";
  EXPECT_THROW(check(schedule, mixed), c10::ValueError);
  EXPECT_THROW(check(schedule, one), c10::ValueError) << "W1 before W0";
}

TEST_F(ScheduleCheck, ChannelOrderMustAgree) {
  swap(1, {kReceiveActivation, 1, 0, 0}, {kReceiveActivation, 1, 1, 0});
  expect_rejected({"rank 1, position 0 (1<0F1)", "message 0", "rank 0, position 2 (0F0>1)"});
}

TEST_F(ScheduleCheck, ReceiveAfterItsUseIsNamed) {
  swap(1, {kReceiveActivation, 1, 0, 0}, {kForward, 1, 0});
  expect_rejected({"rank 1, position 0 (1F0)", "expected after rank 1, position 1 (1<0F0)"});
}

TEST_F(ScheduleCheck, GradientReceivedAfterItsUseIsNamed) {
  swap(0, {kReceiveGradient, 0, 0, 1}, {kBackward, 0, 0});
  expect_rejected({"rank 0, position 9 (0B0)", "expected after rank 0, position 10 (0<1B0)"});
}

TEST_F(ScheduleCheck, SendBeforeItsComputationIsNamed) {
  swap(0, {kSendActivation, 0, 0, 1}, {kForward, 0, 0});
  expect_rejected({"rank 0, position 1 (0F0>1)", "expected after rank 0, position 2 (0F0)"});
}

TEST_F(ScheduleCheck, GradientSentBeforeItsComputationIsNamed) {
  swap(1, {kSendGradient, 1, 0, 0}, {kBackward, 1, 0});
  expect_rejected({"rank 1, position 7 (1B0>0)", "expected after rank 1, position 8 (1B0)"});
}

TEST_F(ScheduleCheck, DeadlockNamesEveryWaitingRank) {
  move_to(0, {kReceiveGradient, 0, 0, 1}, 0);  // before the forward that this gradient depends on
  expect_rejected({"deadlock", "rank 0, position 0 (0<1B0) waits for rank 1, position 8 (1B0>0)",
                   "rank 1, position 0 (1<0F0) waits for", "rank 2, position 0 (2<inF0)"});
}

TEST_F(ScheduleCheck, TooManyMicrobatchesInFlightAreNamed) {
  schedule_.in_flight_limits[0] = 2;
  expect_rejected({"rank 0, position 7 (0F2)", "at most 2", "stage 0, got 3"});
}

TEST_F(ScheduleCheck, LocalActivationBeforeItsProducerIsNamed) {
  graph_.num_ranks = 1;
  graph_.rank_of_stage = {0, 0, 0};
  schedule_ = generate({ScheduleKind::kInterleaved}, graph_, 1);
  swap(0, {kForward, 0, 0}, {kForward, 1, 0});
  expect_rejected({"rank 0, position 0 (1F0)", "expected after rank 0, position 1 (0F0)"});
}

TEST_F(ScheduleCheck, LocalGradientBeforeItsProducerIsNamed) {
  graph_.num_ranks = 1;
  graph_.rank_of_stage = {0, 0, 0};
  schedule_ = generate({ScheduleKind::kInterleaved}, graph_, 1);
  swap(0, {kBackward, 0, 0}, {kBackward, 1, 0});
  expect_rejected({"rank 0, position 5 (0B0)", "expected after rank 0, position 7 (1B0)"});
}

TEST_F(ScheduleCheck, WrongSizesAreRefused) {
  const Schedule good = schedule_;
  schedule_.columns.pop_back();
  expect_rejected({"one column for each of 3 ranks", "2 columns"});
  schedule_ = good;
  schedule_.in_flight_limits.pop_back();
  expect_rejected({"3 stages, got 2"});
  const std::vector<const StageGraph*> three(3, &graph_);
  EXPECT_THROW(check(good, three), c10::ValueError);
}

}  // namespace
}  // namespace smp::partitioner
