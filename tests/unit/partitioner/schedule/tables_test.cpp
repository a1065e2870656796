// Literal tables: 1 to 4 stages, 1 to 8 microbatches, both schedules. Stage s of p, interleaved: min(m, p - s) forwards of
// warm-up, then backward and forward in turn (1F1B); simple: all forwards, then all backwards (GPipe).
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>

#include "partitioner/schedule/check.h"
#include "partitioner/schedule/generate.h"
#include "tests/support/schedule_text.h"
#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

// Blocks of "kind stages microbatches" and a table.
constexpr const char* kSimpleTables = R"(
1 1
stage 0 | F0 B0
1 2
stage 0 | F0 F1 B0 B1
1 3
stage 0 | F0 F1 F2 B0 B1 B2
1 4
stage 0 | F0 F1 F2 F3 B0 B1 B2 B3
1 5
stage 0 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
1 6
stage 0 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
1 7
stage 0 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
1 8
stage 0 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
2 1
stage 0 | F0 B0
stage 1 | F0 B0
2 2
stage 0 | F0 F1 B0 B1
stage 1 | F0 F1 B0 B1
2 3
stage 0 | F0 F1 F2 B0 B1 B2
stage 1 | F0 F1 F2 B0 B1 B2
2 4
stage 0 | F0 F1 F2 F3 B0 B1 B2 B3
stage 1 | F0 F1 F2 F3 B0 B1 B2 B3
2 5
stage 0 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
stage 1 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
2 6
stage 0 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
stage 1 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
2 7
stage 0 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
stage 1 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
2 8
stage 0 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
stage 1 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
3 1
stage 0 | F0 B0
stage 1 | F0 B0
stage 2 | F0 B0
3 2
stage 0 | F0 F1 B0 B1
stage 1 | F0 F1 B0 B1
stage 2 | F0 F1 B0 B1
3 3
stage 0 | F0 F1 F2 B0 B1 B2
stage 1 | F0 F1 F2 B0 B1 B2
stage 2 | F0 F1 F2 B0 B1 B2
3 4
stage 0 | F0 F1 F2 F3 B0 B1 B2 B3
stage 1 | F0 F1 F2 F3 B0 B1 B2 B3
stage 2 | F0 F1 F2 F3 B0 B1 B2 B3
3 5
stage 0 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
stage 1 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
stage 2 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
3 6
stage 0 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
stage 1 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
stage 2 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
3 7
stage 0 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
stage 1 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
stage 2 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
3 8
stage 0 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
stage 1 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
stage 2 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
4 1
stage 0 | F0 B0
stage 1 | F0 B0
stage 2 | F0 B0
stage 3 | F0 B0
4 2
stage 0 | F0 F1 B0 B1
stage 1 | F0 F1 B0 B1
stage 2 | F0 F1 B0 B1
stage 3 | F0 F1 B0 B1
4 3
stage 0 | F0 F1 F2 B0 B1 B2
stage 1 | F0 F1 F2 B0 B1 B2
stage 2 | F0 F1 F2 B0 B1 B2
stage 3 | F0 F1 F2 B0 B1 B2
4 4
stage 0 | F0 F1 F2 F3 B0 B1 B2 B3
stage 1 | F0 F1 F2 F3 B0 B1 B2 B3
stage 2 | F0 F1 F2 F3 B0 B1 B2 B3
stage 3 | F0 F1 F2 F3 B0 B1 B2 B3
4 5
stage 0 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
stage 1 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
stage 2 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
stage 3 | F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
4 6
stage 0 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
stage 1 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
stage 2 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
stage 3 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
4 7
stage 0 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
stage 1 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
stage 2 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
stage 3 | F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6
4 8
stage 0 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
stage 1 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
stage 2 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
stage 3 | F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
)";

constexpr const char* kInterleavedTables = R"(
1 1
stage 0 | F0 B0
1 2
stage 0 | F0 B0 F1 B1
1 3
stage 0 | F0 B0 F1 B1 F2 B2
1 4
stage 0 | F0 B0 F1 B1 F2 B2 F3 B3
1 5
stage 0 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
1 6
stage 0 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
1 7
stage 0 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6
1 8
stage 0 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
2 1
stage 0 | F0 B0
stage 1 | F0 B0
2 2
stage 0 | F0 F1 B0 B1
stage 1 | F0 B0 F1 B1
2 3
stage 0 | F0 F1 B0 F2 B1 B2
stage 1 | F0 B0 F1 B1 F2 B2
2 4
stage 0 | F0 F1 B0 F2 B1 F3 B2 B3
stage 1 | F0 B0 F1 B1 F2 B2 F3 B3
2 5
stage 0 | F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
stage 1 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
2 6
stage 0 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
stage 1 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
2 7
stage 0 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 B6
stage 1 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6
2 8
stage 0 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
stage 1 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
3 1
stage 0 | F0 B0
stage 1 | F0 B0
stage 2 | F0 B0
3 2
stage 0 | F0 F1 B0 B1
stage 1 | F0 F1 B0 B1
stage 2 | F0 B0 F1 B1
3 3
stage 0 | F0 F1 F2 B0 B1 B2
stage 1 | F0 F1 B0 F2 B1 B2
stage 2 | F0 B0 F1 B1 F2 B2
3 4
stage 0 | F0 F1 F2 B0 F3 B1 B2 B3
stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
stage 2 | F0 B0 F1 B1 F2 B2 F3 B3
3 5
stage 0 | F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
stage 1 | F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
stage 2 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
3 6
stage 0 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
stage 1 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
stage 2 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
3 7
stage 0 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 B5 B6
stage 1 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 B6
stage 2 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6
3 8
stage 0 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
stage 1 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
stage 2 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
4 1
stage 0 | F0 B0
stage 1 | F0 B0
stage 2 | F0 B0
stage 3 | F0 B0
4 2
stage 0 | F0 F1 B0 B1
stage 1 | F0 F1 B0 B1
stage 2 | F0 F1 B0 B1
stage 3 | F0 B0 F1 B1
4 3
stage 0 | F0 F1 F2 B0 B1 B2
stage 1 | F0 F1 F2 B0 B1 B2
stage 2 | F0 F1 B0 F2 B1 B2
stage 3 | F0 B0 F1 B1 F2 B2
4 4
stage 0 | F0 F1 F2 F3 B0 B1 B2 B3
stage 1 | F0 F1 F2 B0 F3 B1 B2 B3
stage 2 | F0 F1 B0 F2 B1 F3 B2 B3
stage 3 | F0 B0 F1 B1 F2 B2 F3 B3
4 5
stage 0 | F0 F1 F2 F3 B0 F4 B1 B2 B3 B4
stage 1 | F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
stage 2 | F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
stage 3 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
4 6
stage 0 | F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
stage 1 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
stage 2 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
stage 3 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
4 7
stage 0 | F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 B4 B5 B6
stage 1 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 B5 B6
stage 2 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 B6
stage 3 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6
4 8
stage 0 | F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
stage 1 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
stage 2 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
stage 3 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
)";

/// Compares every table of `text` with the generated one; returns how many there were.
int compare(ScheduleKind kind, const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  std::map<std::pair<int, int>, std::string> expected;  // by (stages, microbatches)
  std::string* table = nullptr;
  while (std::getline(lines, line)) {
    if (line.empty()) continue;
    if (line.starts_with("stage")) {
      *table += line + "\n";
    } else {
      table = &expected[{line[0] - '0', line[2] - '0'}];
    }
  }
  for (const auto& [size, rows] : expected) {
    const StageGraph graph = testing::chain(size.first);
    const Schedule schedule = generate({kind}, graph, size.second);
    EXPECT_EQ(support::to_table(schedule), rows) << size.first << " stages, " << size.second << " microbatches";
    EXPECT_NO_THROW(check(schedule, graph));
  }
  return static_cast<int>(expected.size());
}

TEST(ScheduleTables, SimpleEqualsGPipe) { EXPECT_EQ(compare(ScheduleKind::kSimple, kSimpleTables), 32); }

TEST(ScheduleTables, InterleavedEqualsOneForwardOneBackward) {
  EXPECT_EQ(compare(ScheduleKind::kInterleaved, kInterleavedTables), 32);
}

TEST(ScheduleTables, EvaluationIsForwardsOnlyForBothKinds) {
  const StageGraph graph = testing::chain(3, /*has_backward=*/false);
  const std::string expected =
      "stage 0 | F0 F1 F2\n"
      "stage 1 | F0 F1 F2\n"
      "stage 2 | F0 F1 F2\n";
  EXPECT_EQ(support::to_table(generate({ScheduleKind::kSimple}, graph, 3)), expected);
  EXPECT_EQ(support::to_table(generate({ScheduleKind::kInterleaved}, graph, 3)), expected);
}

TEST(ScheduleTables, TwoMoreActiveMicrobatchesDeepenTheWarmUp) {
  // Eager 1F1B: SageMaker's default of active_microbatches = stages + 2.
  const Schedule schedule = generate({.kind = ScheduleKind::kInterleaved, .active_microbatches = 5}, testing::chain(3), 6);
  EXPECT_EQ(support::to_table(schedule),
            "stage 0 | F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5\n"
            "stage 1 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5\n"
            "stage 2 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5\n");
}

TEST(ScheduleTables, TransfersStandBesideTheirComputations) {
  const Schedule schedule = generate({ScheduleKind::kInterleaved}, testing::chain(3), 2);
  EXPECT_EQ(support::to_table(schedule, support::TableContent::kComputeAndTransfers),
            "stage 0 | inF0>2 F0 F0>1 inF1>2 F1 F1>1 <1B0 B0 W0 <1B1 B1 W1\n"
            "stage 1 | <0F0 F0 F0>2 <0F1 F1 F1>2 <2B0 B0 B0>0 W0 <2B1 B1 B1>0 W1\n"
            "stage 2 | <inF0 <1F0 F0 B0 B0>1 W0 <inF1 <1F1 F1 B1 B1>1 W1\n");
}

TEST(ScheduleTables, SeveralStagesOfOneRankAreNumbered) {
  StageGraph graph = testing::chain(4);
  graph.num_ranks = 3;
  graph.rank_of_stage = {0, 1, 0, 1};  // rank 2 has none
  EXPECT_EQ(support::to_table(generate({ScheduleKind::kInterleaved}, graph, 2)),
            "rank 0 | 0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1\n"
            "rank 1 | 1F0 1F1 3F0 3B0 3F1 1B0 3B1 1B1\n"
            "rank 2 |\n");
}

TEST(ScheduleTables, LabelsOfTenStagesAlign) {
  const std::string table = support::to_table(generate({ScheduleKind::kSimple}, testing::chain(11), 1));
  EXPECT_TRUE(table.starts_with("stage  0 | F0 B0\n")) << table;
  EXPECT_TRUE(table.ends_with("stage 10 | F0 B0\n")) << table;
}

}  // namespace
}  // namespace smp::partitioner
