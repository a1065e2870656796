// The JSON-lines log of the examples.
#include "examples/common/step_log.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <boost/json/parse.hpp>
#include <cmath>
#include <limits>

#include "tests/unit/examples/temporary_folder.h"

namespace {

using examples::StepLog;

TEST(StepLog, WritesOneLinePerStepBetweenStartAndSummary) {
  const TemporaryFolder folder;
  StepLog log(folder.path("log"), true);
  log.start("{\"seed\":0}", "{\n  \"stages\": [1, 2],\r\n  \"name\": \"a\\nb\"\n}");
  log.step({.step = 1, .loss = 0.1F, .step_s = 0.25, .figures = {{"tokens_per_s", 2240}}});
  log.step({.step = 2, .loss = 1234567890.125, .step_s = 1e-7, .figures = {{"a \"name\"", 0.5}, {"b", 0}}});
  log.finish({{"test perplexity", 200.5}, {"steps", 2}});
  EXPECT_EQ(folder.read("log"),
            "{\"config\":{\"seed\":0},\"plan\":{   \"stages\": [1, 2],    \"name\": \"a\\nb\" }}\n"
            "{\"step\":1,\"loss\":0.100000001,\"step_s\":0.25,\"tokens_per_s\":2240}\n"
            "{\"step\":2,\"loss\":1.23456789e+09,\"step_s\":1e-07,\"a \\\"name\\\"\":0.5,\"b\":0}\n"
            "{\"summary\":{\"test perplexity\":200.5,\"steps\":2}}\n");
}

TEST(StepLog, NineDigitsTellNeighbouringFloatsApart) {
  const TemporaryFolder folder;
  StepLog log(folder.path("log"), true);
  float loss = 7.123456F;
  for (int64_t step = 1; step <= 100; ++step) {
    log.step({.step = step, .loss = loss});
    loss = std::nextafter(loss, 8.0F);
  }
  std::istringstream lines(folder.read("log"));
  float expected = 7.123456F;
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const double read = boost::json::parse(line).at("loss").to_number<double>();
    ASSERT_EQ(static_cast<float>(read), expected) << line;
    expected = std::nextafter(expected, 8.0F);
  }
  EXPECT_EQ(count, 100);
}

TEST(StepLog, EveryLineIsThereAtOnceAndIsJson) {
  const TemporaryFolder folder;
  StepLog log(folder.path("log"), true);
  log.step({.step = 1, .loss = std::numeric_limits<double>::quiet_NaN(), .step_s = std::numeric_limits<double>::infinity()});
  EXPECT_EQ(folder.read("log"), "{\"step\":1,\"loss\":null,\"step_s\":null}\n");
  log.finish({{"a \"name\"", 1}});
  std::istringstream lines(folder.read("log"));
  for (std::string line; std::getline(lines, line);) {
    EXPECT_TRUE(boost::json::parse(line).is_object());
  }
}

TEST(StepLog, ReplacesAnOldFile) {
  const TemporaryFolder folder;
  folder.write("log", "old\n");
  StepLog(folder.path("log"), true).finish({});
  EXPECT_EQ(folder.read("log"), "{\"summary\":{}}\n");
}

TEST(StepLog, OfOtherRanksOrWithoutPathWritesNothing) {
  const TemporaryFolder folder;
  StepLog other_rank(folder.path("log"), false);
  other_rank.start("{}", "{}");
  other_rank.step({});
  StepLog without_path("", true);
  without_path.finish({});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(StepLog, RefusesAFileThatCannotBeWrittenAndTextThatIsNoJson) {
  EXPECT_THROW(StepLog("/no/such/folder/log", true), c10::ValueError);
  const TemporaryFolder folder;
  StepLog log(folder.path("log"), true);
  EXPECT_THROW(log.start("{}", "stage 0"), c10::ValueError);
  EXPECT_THROW(log.start("", "{}"), c10::ValueError);
  EXPECT_EQ(folder.read("log"), "");
}

TEST(StepLog, AFullDiskIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  StepLog log("/dev/full", true);
  EXPECT_THROW(log.step({.step = 1}), c10::Error);
}

}  // namespace
