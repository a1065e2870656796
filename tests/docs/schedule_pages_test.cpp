// The schedules printed in docs/schedules.md are those that the generator makes.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "partitioner/schedule/generate.h"
#include "tests/support/schedule_text.h"
#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

void expect_in_page(const std::string& table) {
  std::ifstream file(SMP_SOURCE_DIR "/docs/schedules.md");
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_NE(text.str().find("```text\n" + table), std::string::npos) << "expected in docs/schedules.md:\n" << table;
}

std::string table_of_chain(ScheduleKind kind) { return support::to_table(generate({kind}, testing::chain(3), 4)); }

TEST(SchedulesPage, ShowsSimple) { expect_in_page(table_of_chain(ScheduleKind::kSimple)); }

TEST(SchedulesPage, ShowsInterleavedOnceAndWithTwoVisits) {
  expect_in_page(table_of_chain(ScheduleKind::kInterleaved));
  StageGraph looped = testing::chain(4);
  looped.num_ranks = 2;
  looped.rank_of_stage = {0, 1, 0, 1};
  const ScheduleOptions twice{.virtual_stages = 2};
  expect_in_page(support::to_table(generate(twice, looped, 4)));
}

}  // namespace
}  // namespace smp::partitioner
