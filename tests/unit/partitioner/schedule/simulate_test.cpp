// The simulator against runs computed by hand.
#include "partitioner/schedule/simulate.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "partitioner/schedule/check.h"
#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

/// Two stages without step inputs for the second; F = 10 us, B = 20 us.
class Simulate : public ::testing::Test {
 protected:
  Simulate() {
    graph_.activations = {{kInputStage, 0}, {0, 1}};
    input_.times = {{10, 20}, {10, 20}};
  }

  ActionTime time_of(const Schedule& schedule, const Simulation& simulation, const Action& action) {
    for (size_t rank = 0; rank < schedule.columns.size(); ++rank) {
      for (size_t i = 0; i < schedule.columns[rank].size(); ++i) {
        if (schedule.columns[rank][i] == action) return simulation.times[rank][i];
      }
    }
    ADD_FAILURE() << to_string(action) << " is not in the table";
    return {};
  }

  StageGraph graph_ = testing::chain(2);
  SimulationInput input_;
};

using enum ActionKind;

TEST_F(Simulate, OverlappedTransfersDelayTheReceiverOnly) {
  input_.transfers = {{{0, 1}, 3}, {{1, 0}, 4}};
  const Schedule schedule = generate({ScheduleKind::kSimple}, graph_, 2);
  const Simulation simulation = simulate(schedule, input_);
  EXPECT_EQ(time_of(schedule, simulation, {kForward, 0, 1}), (ActionTime{10, 20}));
  EXPECT_EQ(time_of(schedule, simulation, {kReceiveActivation, 1, 0, 0}), (ActionTime{0, 13}));
  EXPECT_EQ(time_of(schedule, simulation, {kForward, 1, 1}), (ActionTime{23, 33}));
  EXPECT_EQ(time_of(schedule, simulation, {kBackward, 1, 1}), (ActionTime{53, 73}));
  EXPECT_EQ(time_of(schedule, simulation, {kBackward, 0, 0}), (ActionTime{57, 77}));
  EXPECT_EQ(simulation.makespan_us, 97);
  EXPECT_DOUBLE_EQ(simulation.bubble, 1 - 60.0 / 97);
}

TEST_F(Simulate, OccupyingTransfersDelayBothRanks) {
  input_.transfers = {{{0, 1}, 3}, {{1, 0}, 4}};
  input_.transfers_occupy_ranks = true;
  const Schedule schedule = generate({ScheduleKind::kSimple}, graph_, 2);
  const Simulation simulation = simulate(schedule, input_);
  EXPECT_EQ(time_of(schedule, simulation, {kSendActivation, 0, 0, 1}), (ActionTime{10, 13}));
  EXPECT_EQ(time_of(schedule, simulation, {kForward, 1, 1}), (ActionTime{26, 36}));
  EXPECT_EQ(time_of(schedule, simulation, {kBackward, 0, 0}), (ActionTime{60, 80}));
  EXPECT_EQ(simulation.makespan_us, 104);
}

TEST_F(Simulate, ReceiveThatWaitedForItsRankStillTakesItsTime) {
  input_.times = {{1, 1}, {10, 20}};
  input_.transfers = {{{0, 1}, 3}, {{1, 0}, 4}};
  input_.transfers_occupy_ranks = true;
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, graph_, 4);
  const Simulation simulation = simulate(schedule, input_);
  // The second message is there since 8; rank 1 takes it after its backward and its send.
  EXPECT_EQ(time_of(schedule, simulation, {kReceiveActivation, 1, 1, 0}), (ActionTime{38, 41}));
  EXPECT_GE(simulation.makespan_us, 4 * (10 + 20 + 3 + 4));
}

// F0 F1 B0 B1 behind F0 B0 F1 B1 of the second stage, whose gradients leave after 12 of 20 us.
TEST_F(Simulate, GradientsLeaveBeforeThoseOfParametersAreMade) {
  input_.times[1] = {10, 12, 8};
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, graph_, 2);
  const Simulation simulation = simulate(schedule, input_);
  const ActionTime first = time_of(schedule, simulation, {kBackward, 1, 0});
  EXPECT_EQ(first.start_us, 20);
  EXPECT_EQ(first.end_us, 32);
  EXPECT_EQ(time_of(schedule, simulation, {kWeightGradient, 1, 0}), (ActionTime{32, 40}));
  EXPECT_EQ(time_of(schedule, simulation, {kBackward, 0, 0}).start_us, 32);
  EXPECT_EQ(time_of(schedule, simulation, {kForward, 1, 1}).start_us, 40);
  EXPECT_EQ(time_of(schedule, simulation, {kBackward, 0, 1}).start_us, 62);
  EXPECT_EQ(simulation.makespan_us, 82);  // 90 if they left behind it
  input_.times[1].of(kWeightGradient) = -1;
  EXPECT_THROW(simulate(schedule, input_), c10::ValueError);
}

TEST_F(Simulate, MessagesOfOneEdgeFollowOneAnother) {
  input_.transfers = {{{0, 1}, 30}};
  const Schedule schedule = generate({ScheduleKind::kSimple}, graph_, 2);
  const Simulation simulation = simulate(schedule, input_);
  EXPECT_EQ(time_of(schedule, simulation, {kForward, 1, 0}).start_us, 40);
  EXPECT_EQ(time_of(schedule, simulation, {kForward, 1, 1}).start_us, 70);
}

TEST_F(Simulate, UnequalStagesWaitForTheSlowest) {
  input_.times = {{1, 1}, {10, 20}};
  const Simulation simulation = simulate(generate({ScheduleKind::kInterleaved}, graph_, 4), input_);
  EXPECT_EQ(simulation.makespan_us, 1 + 4 * 30 + 1);
  EXPECT_DOUBLE_EQ(simulation.bubble, 1 - (8 + 120) / 2 / 122.0);
}

TEST_F(Simulate, MicrobatchesMayTakeDifferentTimes) {
  input_.microbatch_times = {{{10, 20}, {10, 20}}, {{10, 20}, {40, 20}}};
  const Schedule schedule = generate({ScheduleKind::kSimple}, graph_, 2);
  const Simulation simulation = simulate(schedule, input_);
  EXPECT_EQ(time_of(schedule, simulation, {kForward, 1, 0}), (ActionTime{10, 20}));
  EXPECT_EQ(time_of(schedule, simulation, {kForward, 1, 1}), (ActionTime{20, 60}));
  EXPECT_EQ(simulation.makespan_us, 60 + 20 + 20 + 20);
}

TEST_F(Simulate, StagesHoldAsManyMicrobatchesAsTheirScheduleLetsThem) {
  const auto peaks = [&](ScheduleKind kind) { return testing::peak_in_flight(generate({kind}, graph_, 4)); };
  EXPECT_EQ(peaks(ScheduleKind::kInterleaved), (std::vector{2, 1}));
  EXPECT_EQ(peaks(ScheduleKind::kSimple), (std::vector{4, 4}));
}

TEST_F(Simulate, RankWithAllStagesHasNoBubble) {
  graph_.num_ranks = 1;
  graph_.rank_of_stage = {0, 0};
  EXPECT_EQ(simulate(generate({ScheduleKind::kInterleaved}, graph_, 3), input_).bubble, 0);
}

TEST_F(Simulate, EvaluationHoldsNothing) {
  const StageGraph graph = testing::chain(2, /*has_backward=*/false);
  EXPECT_EQ(testing::peak_in_flight(generate({ScheduleKind::kInterleaved}, graph, 5)), (std::vector{0, 0}));
}

TEST_F(Simulate, IdleRankIsAllBubble) {
  graph_.num_ranks = 3;
  const Simulation simulation = simulate(generate({ScheduleKind::kSimple}, graph_, 1), input_);
  EXPECT_DOUBLE_EQ(simulation.bubble, (0.5 + 0.5 + 1) / 3);
}

TEST_F(Simulate, FourThousandRanksFitOnALaptop) {
  const int num_ranks = 4096;
  const StageGraph graph = testing::chain(num_ranks);
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, graph, 8);
  check(schedule, graph);
  input_.times.assign(num_ranks, {1, 2});
  EXPECT_EQ(simulate(schedule, input_).makespan_us, 3 * (num_ranks + 8 - 1));
}

TEST_F(Simulate, BadInputIsRefused) {
  Schedule schedule = generate({ScheduleKind::kSimple}, graph_, 1);
  SimulationInput input = input_;
  input.times.pop_back();
  EXPECT_THROW(simulate(schedule, input), c10::ValueError);
  input = input_;
  input.microbatch_times = {{{10, 20}}};
  EXPECT_THROW(simulate(schedule, input), c10::ValueError);
  input.microbatch_times = {{{10, 20}, {10, 20}}, {{10, 20}, {10, 20}}};
  EXPECT_THROW(simulate(schedule, input), c10::ValueError);
  input.microbatch_times = {{{10, 20}}, {{10, -20}}};
  EXPECT_THROW(simulate(schedule, input), c10::ValueError);
  input = input_;
  input.transfers = {{{0, 1}, -1}};
  EXPECT_THROW(simulate(schedule, input), c10::ValueError);
  std::swap(schedule.columns[0][2], schedule.columns[0][1]);  // receives before it sends
  EXPECT_THROW(simulate(schedule, input_), c10::ValueError);
}

}  // namespace
}  // namespace smp::partitioner
