// Every model of the zoo on four processes, as replicas of a pipeline of the given number of stages: gradients are those of
// the unsplit model over the whole batch, and the same bits whether they travel during the backward or after it.
#include <gtest/gtest.h>

#include <cstdlib>

#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/model_zoo.h"
#include "tests/support/oracle.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

using support::OracleResult;
using support::SplitOptions;
using support::ZooModel;

class ReplicaProcesses : public testing::TestWithParam<ZooModel> {};

TEST_P(ReplicaProcesses, OverlappedOrNotGiveTheGradientsOfTheUnsplitModel) {
  const ZooModel& model = GetParam();
  const auto microbatches = static_cast<int>(config().microbatches) * dp_size();
  SplitOptions during = support::kLastOfSeveral;
  during.bucket_bytes = 512;
  during.look = [&] {
    for (const auto& report : support::stage_reports())
      EXPECT_GT(report.num_taped, 0) << model.name << report.stays_on_autograd;
  };
  SplitOptions after = support::kLastOfSeveral;
  after.model.overlapping_allreduce = false;
  const OracleResult want = support::run_unsplit(model, microbatches, during);
  const OracleResult overlapped = support::run_split(model, during);
  const OracleResult at_the_end = support::run_split(model, after);
  support::expect_bit_equal(overlapped.gradients, at_the_end.gradients, model.name + ": overlapped");
  for (const auto& [name, gradient] : overlapped.gradients) {
    ASSERT_EQ(gradient.defined(), want.gradients.at(name).defined()) << name;
    if (gradient.defined()) support::expect_close(gradient, want.gradients.at(name), 1e-6, model.name + ": " + name);
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, ReplicaProcesses, testing::ValuesIn(support::model_zoo()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace smp

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(catch_exceptions, false);  // an exception ends the job instead of one rank's test
  const int stages = argc > 1 ? std::atoi(argv[1]) : 1;
  smp::init({.pipeline_parallel_degree = stages,
             .microbatches = 2,
             .seed = smp::support::kSplitBaseSeed,
             .log_level = smp::LogLevel::kWarning});
  const int failed = RUN_ALL_TESTS();
  smp::shutdown();
  return failed;
}
