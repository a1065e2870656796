// Properties of generated schedules: closed forms on chains, random stage graphs, bad options.
#include "partitioner/schedule/generate.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "partitioner/schedule/check.h"
#include "partitioner/schedule/simulate.h"
#include "tests/support/schedule_text.h"
#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

constexpr int kLargest = 64;  // stages and microbatches

Simulation simulate_equal_stages(const Schedule& schedule, StageTime time) {
  SimulationInput input;
  input.times.assign(schedule.in_flight_limits.size(), time);
  return simulate(schedule, input);
}

template <typename Visitor>
void for_each_size(const Visitor& visit) {
  for (int p = 1; p <= kLargest; ++p) {
    for (int m = 1; m <= kLargest; ++m) visit(p, m);
  }
}

/// Checks one chain of p equal stages against (m + p - 1) (F + B); `in_flight(stage)` is what it should hold.
template <typename InFlight>
void expect_closed_forms(ScheduleKind kind, int p, int m, int active, const InFlight& in_flight) {
  const Schedule schedule = generate({.kind = kind, .active_microbatches = active}, testing::chain(p), m);
  std::vector<int> held;
  for (int s = 0; s < p; ++s) held.push_back(in_flight(s));
  for (const StageTime time : {StageTime{1, 1}, StageTime{1, 2}}) {
    const Simulation simulation = simulate_equal_stages(schedule, time);
    const std::string size = std::to_string(p) + " stages, " + std::to_string(m) + " microbatches";
    const double bubble = (p - 1.0) / (m + p - 1.0);
    EXPECT_EQ(simulation.makespan_us, (m + p - 1) * (time.total_us())) << size;
    EXPECT_NEAR(simulation.bubble, bubble, 1e-12) << size;
  }
  EXPECT_EQ(testing::peak_in_flight(schedule), held) << p << " stages, " << m << " microbatches";
}

TEST(ScheduleGenerate, SimpleChainHasClosedFormBubbleAndHoldsAllMicrobatches) {
  for_each_size([](int p, int m) { expect_closed_forms(ScheduleKind::kSimple, p, m, 0, [&](int) { return m; }); });
}

TEST(ScheduleGenerate, InterleavedChainHasClosedFormBubbleAndHoldsStagesMinusStage) {
  for_each_size([](int p, int m) {
    expect_closed_forms(ScheduleKind::kInterleaved, p, m, 0, [&](int s) { return std::min(m, p - s); });
  });
}

TEST(ScheduleGenerate, TwoMoreActiveMicrobatchesKeepBubbleAndHoldTwoMore) {
  for_each_size([](int p, int m) {
    // F0 runs at s and B0 is ready at 2p - 1 - s: more forwards than fit in between cannot start.
    expect_closed_forms(ScheduleKind::kInterleaved, p, m, p + 2,
                        [&](int s) { return std::min({m, p + 2 - s, 2 * (p - s) - 1}); });
  });
}

TEST(ScheduleGenerate, OneActiveMicrobatchRunsOneAtATime) {
  const Schedule schedule = generate({.kind = ScheduleKind::kInterleaved, .active_microbatches = 1}, testing::chain(4), 5);
  EXPECT_EQ(testing::peak_in_flight(schedule), std::vector<int>(4, 1));
  check(schedule, testing::chain(4));
}

struct RandomCase {
  std::vector<StageGraph> graphs;  // two, of one placement or of two
  std::vector<const StageGraph*> graph_of_microbatch;
  ScheduleOptions options;
};

RandomCase random_case(int seed) {
  testing::RandomGraphs random(seed);
  RandomCase result;
  const int num_ranks = random.number(1, 5);
  auto placement = random.placement(num_ranks, random.number(1, 12));
  result.graphs.push_back(random.stage_graph(num_ranks, placement));
  if (random.happens(0.6)) placement = random.placement(num_ranks, random.number(1, 12));
  result.graphs.push_back(random.stage_graph(num_ranks, placement));
  const int num_microbatches = random.number(1, 9);
  for (int m = 0; m < num_microbatches; ++m) {
    result.graph_of_microbatch.push_back(&result.graphs[random.happens(0.6) ? 0 : 1]);
  }
  result.options.kind = random.happens(0.7) ? ScheduleKind::kInterleaved : ScheduleKind::kSimple;
  result.options.active_microbatches = random.number(0, 8);
  return result;
}

TEST(ScheduleGenerate, AThousandRandomGraphsEndAndPassTheCheck) {
  for (int seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    const RandomCase given = random_case(seed);
    const Schedule schedule = generate(given.options, given.graph_of_microbatch);
    ASSERT_NO_THROW(check(schedule, given.graph_of_microbatch))
        << support::to_table(schedule, support::TableContent::kComputeAndTransfers);
    EXPECT_EQ(schedule, generate(given.options, given.graph_of_microbatch));
    const Simulation simulation = simulate_equal_stages(schedule, {1, 2});
    double busiest_us = 0;
    for (const auto& column : schedule.columns) {
      double busy_us = 0;
      for (const Action& action : column) {
        if (action.is_compute()) busy_us += StageTime{1, 2}.of(action.kind);
      }
      busiest_us = std::max(busiest_us, busy_us);
    }
    EXPECT_GE(simulation.makespan_us, busiest_us);
    if (given.graphs[0].rank_of_stage != given.graphs[1].rank_of_stage) continue;
    for (size_t stage = 0; stage < schedule.in_flight_limits.size(); ++stage) {
      EXPECT_LE(testing::peak_in_flight(schedule)[stage], schedule.in_flight_limits[stage]);
    }
  }
}

TEST(ScheduleGenerate, ParallelTowersRunAtTheSameTime) {
  StageGraph graph;
  graph.num_ranks = 3;
  graph.rank_of_stage = {0, 1, 2};
  graph.activations = {{kInputStage, 0}, {kInputStage, 1}, {0, 2}, {1, 2}};
  graph.gradients = {{2, 0}, {2, 1}};
  graph.stage_has_backward = {true, true, true};
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, graph, 3);
  check(schedule, graph);
  // Two ticks deep, not three.
  EXPECT_DOUBLE_EQ(simulate_equal_stages(schedule, {1, 1}).makespan_us, 2 * (3 + 2 - 1));
}

TEST(ScheduleGenerate, StageWithoutBackwardKeepsNothingInFlight) {
  StageGraph graph = testing::chain(3);
  graph.gradients = {{2, 1}};  // stage 0: frozen
  graph.stage_has_backward = {false, true, true};
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, graph, 4);
  check(schedule, graph);
  EXPECT_EQ(support::to_table(schedule),
            "stage 0 | F0 F1 F2 F3\n"
            "stage 1 | F0 F1 B0 F2 B1 F3 B2 B3\n"
            "stage 2 | F0 B0 F1 B1 F2 B2 F3 B3\n");
  EXPECT_EQ(testing::peak_in_flight(schedule)[0], 0);
}

TEST(ScheduleGenerate, InputsLeaveBeforeAnEarlierConsumer) {
  // The leader's own stage is the second one.
  StageGraph graph = testing::chain(2, /*has_backward=*/false);
  graph.rank_of_stage = {1, 0};
  graph.activations = {{kInputStage, 0}, {0, 1}};
  const Schedule schedule = generate({ScheduleKind::kSimple}, graph, 3);
  check(schedule, graph);
  EXPECT_EQ(support::to_table(schedule, support::TableContent::kComputeAndTransfers),
            "stage 1 | inF0>0 <0F0 F0 inF1>0 <0F1 F1 inF2>0 <0F2 F2\n"
            "stage 0 | <inF0 F0 F0>1 <inF1 F1 F1>1 <inF2 F2 F2>1\n");
}

TEST(ScheduleGenerate, LimitsScaleWithVisits) {
  EXPECT_EQ(in_flight_limits({ScheduleKind::kInterleaved}, 4, 4, 9), (std::vector{4, 3, 2, 1}));
  EXPECT_EQ(in_flight_limits({ScheduleKind::kInterleaved, 6}, 4, 4, 9), (std::vector{6, 5, 4, 3}));
  EXPECT_EQ(in_flight_limits({ScheduleKind::kInterleaved, 2}, 4, 4, 9), (std::vector{2, 1, 1, 1}));
  EXPECT_EQ(in_flight_limits({ScheduleKind::kInterleaved}, 2, 4, 9), (std::vector{2, 2, 1, 1}));
  EXPECT_EQ(in_flight_limits({ScheduleKind::kSimple}, 2, 3, 9), (std::vector{9, 9, 9}));
  constexpr int kMost = std::numeric_limits<int>::max();
  EXPECT_EQ(in_flight_limits({ScheduleKind::kInterleaved, kMost}, 4, 4, 9), (std::vector{9, 9, 9, 9}));
  EXPECT_EQ(
      generate({ScheduleKind::kInterleaved, kMost}, testing::chain(2), 9).send_limit({ActionKind::kSendActivation, 0, 0, 1}),
      9 + 1);
}

TEST(ScheduleGenerate, LoopedPlacementFillsThePipeline) {
  StageGraph graph = testing::chain(8);
  graph.num_ranks = 4;
  graph.rank_of_stage = {0, 1, 2, 3, 0, 1, 2, 3};
  const int m = 16;
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, graph, m);
  check(schedule, graph);
  EXPECT_LT(simulate_equal_stages(schedule, {1, 1}).bubble, 0.5);
}

/// The microbatches that a rank computes, in the order of its column.
std::vector<int> microbatches_of(const Schedule& schedule, int rank, ActionKind kind) {
  std::vector<int> microbatches;
  for (const Action& action : schedule.columns[static_cast<size_t>(rank)]) {
    if (action.kind == kind) microbatches.push_back(action.microbatch);
  }
  return microbatches;
}

TEST(ScheduleGenerate, MicrobatchesOfAShorterProgramPassTheRanksThatTheyDoNotVisit) {
  const StageGraph whole = testing::chain(3);
  StageGraph shorter = testing::chain(2);  // not on rank 1
  shorter.num_ranks = 3;
  shorter.rank_of_stage = {0, 2};
  const std::vector<const StageGraph*> mixed{&whole, &shorter, &whole, &shorter};
  for (const auto kind : {ScheduleKind::kInterleaved, ScheduleKind::kSimple}) {
    const Schedule schedule = generate({kind}, mixed);
    check(schedule, mixed);
    for (int rank : {0, 2}) {
      for (const auto work : {ActionKind::kForward, ActionKind::kBackward}) {
        EXPECT_EQ(microbatches_of(schedule, rank, work), (std::vector{0, 1, 2, 3}));
      }
    }
    EXPECT_EQ(microbatches_of(schedule, 1, ActionKind::kForward), (std::vector{0, 2}));
  }
  EXPECT_EQ(support::to_table(generate({ScheduleKind::kInterleaved}, mixed)),
            "rank 0 | 0F0 0F1 0F2 0B0 0B1 0F3 0B2 0B3\n"
            "rank 1 | 1F0 1F2 1B0 1B2\n"
            "rank 2 | 2F0 2B0 1F1 1B1 2F2 2B2 1F3 1B3\n");
}

TEST(ScheduleGenerate, ProgramsOfOnePlacementWithAStagePerRankMakeOneTable) {
  const StageGraph one = testing::chain(4), other = one;
  const std::vector<const StageGraph*> mixed{&one, &other, &other, &one, &other, &one};
  for (const auto kind : {ScheduleKind::kInterleaved, ScheduleKind::kSimple}) {
    EXPECT_EQ(generate({kind}, mixed), generate({kind}, one, 6));
  }
}

TEST(ScheduleGenerate, RanksKeepTheOrderOfMicrobatchesBetweenProgramsWithSeveralVisits) {
  StageGraph one = testing::chain(4);
  one.num_ranks = 2;
  one.rank_of_stage = {0, 1, 0, 1};
  const StageGraph other = one;  // a parameter may be on stage 0 here and on stage 2 there
  const std::vector<const StageGraph*> mixed{&one, &other, &one, &other};
  for (const auto kind : {ScheduleKind::kInterleaved, ScheduleKind::kSimple}) {
    const Schedule schedule = generate({kind}, mixed);
    check(schedule, mixed);
    for (int rank : {0, 1}) {
      for (const auto work : {ActionKind::kForward, ActionKind::kBackward}) {
        EXPECT_EQ(microbatches_of(schedule, rank, work), (std::vector{0, 0, 1, 1, 2, 2, 3, 3}));
      }
    }
  }
}

TEST(ScheduleGenerate, InputsOfOneChannelLeaveInOrderWhereALaterMicrobatchVisitsTheLeaderFirst) {
  StageGraph away;  // its stage 0 is not the leader's
  away.num_ranks = 2;
  away.rank_of_stage = {1, 1};
  away.activations = {{kInputStage, 1}};
  away.stage_has_backward = {false, false};
  StageGraph both = away;
  both.rank_of_stage = {0, 1};
  both.activations = {{kInputStage, 0}, {kInputStage, 1}};
  const std::vector<const StageGraph*> mixed{&away, &both};
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, mixed);
  check(schedule, mixed);
  EXPECT_EQ(support::to_table(schedule, support::TableContent::kComputeAndTransfers),
            "rank 0 | inF0>1 inF1>1 0F1\n"
            "rank 1 | 1<inF0 1F0 0F0 1<inF1 1F1\n");
}

TEST(ScheduleGenerate, BadInputIsRefused) {
  const StageGraph graph = testing::chain(2);
  EXPECT_THROW(generate({ScheduleKind::kSimple}, graph, 0), c10::ValueError);
  StageGraph other = graph;
  other.num_ranks = 3;
  const std::vector<const StageGraph*> mixed{&graph, &other};
  EXPECT_THROW(generate({ScheduleKind::kSimple}, mixed), c10::ValueError);
}

}  // namespace
}  // namespace smp::partitioner
