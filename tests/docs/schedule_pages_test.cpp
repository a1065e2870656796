// The schedules printed in the README are those that the generator makes.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "partitioner/schedule/generate.h"
#include "tests/unit/partitioner/schedule_graphs.h"

namespace smp::partitioner {
namespace {

std::string readme() {
  std::ifstream file(SMP_SOURCE_DIR "/README.md");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void expect_in_readme(ScheduleKind kind) {
  const std::string table = generate(kind, testing::chain(3), 4).to_table();
  EXPECT_NE(readme().find("```text\n" + table), std::string::npos) << "expected in README.md:\n"
                                                                   << table;
}

TEST(Readme, ShowsTheInterleavedScheduleOfThreeStages) {
  expect_in_readme(ScheduleKind::kInterleaved);
}
TEST(Readme, ShowsTheSimpleScheduleOfThreeStages) { expect_in_readme(ScheduleKind::kSimple); }

}  // namespace
}  // namespace smp::partitioner
