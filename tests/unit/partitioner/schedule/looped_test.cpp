// Interleaved 1F1B with several visits of each rank, against the tables of Megatron-LM.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "partitioner/schedule/check.h"
#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/simulate.h"
#include "tests/support/schedule_text.h"
#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

StageGraph looped(int num_ranks, int visits, bool has_backward = true) {
  StageGraph graph = testing::chain(num_ranks * visits, has_backward);
  graph.num_ranks = num_ranks;
  for (int stage = 0; stage < graph.num_stages(); ++stage) {
    graph.rank_of_stage[stage] = stage % num_ranks;
  }
  return graph;
}

Schedule interleaved(const StageGraph& graph, int visits, int num_microbatches) {
  return generate({.virtual_stages = visits}, graph, num_microbatches);
}

double bubble(const Schedule& schedule) {
  SimulationInput input;
  input.times.assign(schedule.in_flight_limits.size(), {1, 1});
  return simulate(schedule, input).bubble;
}

/// As Megatron-LM numbers the work of one rank: entry k of a rank's forwards or backwards.
Action megatron(ActionKind kind, int k, int rank, int num_ranks, int visits) {
  const int in_group = k % (num_ranks * visits);
  const int chunk = in_group / num_ranks;
  const int visit = kind == ActionKind::kForward ? chunk : visits - 1 - chunk;
  const int microbatch = k / (num_ranks * visits) * num_ranks + in_group % num_ranks;
  return {kind, visit * num_ranks + rank, microbatch};
}

std::vector<Action> megatron_column(int rank, int num_ranks, int visits, int num_microbatches) {
  const int total = num_microbatches * visits;
  const int warm_up = std::min(total, 2 * (num_ranks - rank - 1) + (visits - 1) * num_ranks);
  std::vector<Action> column;
  for (int k = 0; k < total + warm_up; ++k) {
    if (k < total) column.push_back(megatron(ActionKind::kForward, k, rank, num_ranks, visits));
    if (k >= warm_up) {
      column.push_back(megatron(ActionKind::kBackward, k - warm_up, rank, num_ranks, visits));
    }
  }
  return column;
}

TEST(ScheduleLooped, TwoRanksWithTwoVisitsHaveMegatronsTable) {
  EXPECT_EQ(support::to_table(interleaved(looped(2, 2), 2, 4)),
            "rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
            "rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3\n");
}

TEST(ScheduleLooped, FourRanksWithTwoVisitsHaveMegatronsTable) {
  EXPECT_EQ(support::to_table(interleaved(looped(4, 2), 2, 4)),
            "rank 0 | 0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 4B0 4B1 4B2 4B3 0B0 0B1 0B2 0B3\n"
            "rank 1 | 1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 5B0 5B1 5B2 5B3 1B0 1B1 1B2 1B3\n"
            "rank 2 | 2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 6B2 6B3 2B0 2B1 2B2 2B3\n"
            "rank 3 | 3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3B0 3B1 3B2 3B3\n");
}

TEST(ScheduleLooped, FullGroupsHaveMegatronsColumns) {
  for (int ranks = 2; ranks <= 6; ++ranks) {
    for (int visits = 2; visits <= 4; ++visits) {
      for (int groups = 1; groups <= 4; ++groups) {
        const Schedule schedule = interleaved(looped(ranks, visits), visits, groups * ranks);
        for (int rank = 0; rank < ranks; ++rank) {
          std::vector<Action> computed;
          for (const Action& action : schedule.columns[static_cast<size_t>(rank)]) {
            if (action.is_compute() && action.kind != ActionKind::kWeightGradient) computed.push_back(action);
          }
          EXPECT_TRUE(computed == megatron_column(rank, ranks, visits, groups * ranks)) << "rank " << rank << " of\n"
                                                                                        << support::to_table(schedule);
        }
      }
    }
  }
}

TEST(ScheduleLooped, EveryNumberOfMicrobatchesEndsAndPassesTheCheck) {
  for (int ranks = 2; ranks <= 5; ++ranks) {
    for (int visits = 2; visits <= 4; ++visits) {
      for (int m = 1; m <= 17; ++m) {
        for (const bool has_backward : {true, false}) {
          const StageGraph graph = looped(ranks, visits, has_backward);
          const Schedule schedule = interleaved(graph, visits, m);
          EXPECT_NO_THROW(check(schedule, graph)) << support::to_table(schedule);
        }
      }
    }
  }
}

TEST(ScheduleLooped, RandomGraphsWithSkipsAndFrozenStagesEndAndPassTheCheck) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    testing::RandomGraphs random(seed);
    const int ranks = random.number(2, 5), visits = random.number(2, 4);
    const StageGraph graph = random.stage_graph(ranks, looped(ranks, visits).rank_of_stage);
    const Schedule schedule = interleaved(graph, visits, ranks * random.number(1, 4));
    EXPECT_NO_THROW(check(schedule, graph)) << "seed " << seed << "\n" << support::to_table(schedule);
  }
}

TEST(ScheduleLooped, BubbleShrinksByTheNumberOfVisits) {
  for (const int visits : {2, 4}) {
    // (ranks - 1) / visits of idle time against the microbatches' own.
    const double idle = 3.0 / visits / 16;
    EXPECT_NEAR(bubble(interleaved(looped(4, visits), visits, 16)), idle / (1 + idle), 1e-12);
  }
}

TEST(ScheduleLooped, OtherPlacementsNumbersAndLimitsKeepTheGeneralOrder) {
  StageGraph other = looped(2, 2);
  other.rank_of_stage = {0, 0, 1, 1};
  EXPECT_EQ(interleaved(other, 2, 4), generate({ScheduleKind::kInterleaved}, other, 4));
  const StageGraph graph = looped(2, 2);
  EXPECT_EQ(interleaved(graph, 2, 5), generate({ScheduleKind::kInterleaved}, graph, 5));
  const ScheduleOptions three{.active_microbatches = 3};
  ScheduleOptions both = three;
  both.virtual_stages = 2;
  EXPECT_EQ(generate(both, graph, 4), generate(three, graph, 4));
}

}  // namespace
}  // namespace smp::partitioner
