// The schedules printed in the README and in docs/schedules.md are those that the generator makes.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "partitioner/schedule/generate.h"
#include "tests/support/schedule_text.h"
#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

std::string content_of(const std::string& page) {
  std::ifstream file(SMP_SOURCE_DIR "/" + page);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void expect_in(const std::string& page, const std::string& table) {
  EXPECT_NE(content_of(page).find("```text\n" + table), std::string::npos) << "expected in " << page << ":\n" << table;
}

std::string table_of_chain(ScheduleKind kind) { return support::to_table(generate({kind}, testing::chain(3), 4)); }

TEST(Readme, ShowsTheInterleavedScheduleOfThreeStages) {
  expect_in("README.md", table_of_chain(ScheduleKind::kInterleaved));
}
TEST(Readme, ShowsTheSimpleScheduleOfThreeStages) { expect_in("README.md", table_of_chain(ScheduleKind::kSimple)); }

TEST(SchedulesPage, ShowsInterleavedOnceAndWithTwoVisits) {
  expect_in("docs/schedules.md", table_of_chain(ScheduleKind::kInterleaved));
  StageGraph looped = testing::chain(4);
  looped.num_ranks = 2;
  looped.rank_of_stage = {0, 1, 0, 1};
  const ScheduleOptions twice{.virtual_stages = 2};
  expect_in("docs/schedules.md", support::to_table(generate(twice, looped, 4)));
}

}  // namespace
}  // namespace smp::partitioner
