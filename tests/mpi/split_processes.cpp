// Models of the zoo, split over the processes of mpirun: bit-equal to the unsplit model. Driven by
// split_processes_test.py, which chooses microbatches and schedule through SMP_CONFIG.
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

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

// Half of the zoo: every kind of cut, sharing and hidden state that it has.
constexpr const char* kModels[] = {"transformer", "gpt",    "unet",         "lstm",          "convnet",
                                   "two_towers",  "resnet", "tuple_output", "several_inputs"};

// Set by --one-ulp-off: the proof that one bit in one gradient of one rank is noticed.
bool is_one_ulp_off = false;
// Set by --delayed: models are constructed without values.
bool is_delayed = false;

std::string name_of_setting(const ZooModel& model) {
  const char* schedule = config().pipeline == Pipeline::kSimple ? "simple" : "interleaved";
  return model.name + ", rank " + std::to_string(rank()) + " of " + std::to_string(size()) + " stages, " +
         std::to_string(config().microbatches) + " microbatches, " + schedule + ":";
}

void change_one_bit(OracleResult& result) {
  auto* first = result.gradients.begin()->second.mutable_data_ptr<float>();
  *first = std::nextafter(*first, std::numeric_limits<float>::infinity());
}

// Every rank compares the gradients it holds; together they must hold all.
void expect_all_held(const OracleResult& mine, const OracleResult& whole) {
  for (const auto& [name, gradient] : whole.gradients) {
    const at::Tensor holds_it = at::tensor(mine.gradients.count(name) == 1 ? 1.0 : 0.0, at::kDouble);
    EXPECT_GT(all_reduce_mean(holds_it, CommGroup::PP_GROUP).item<double>(), 0) << name << " lives nowhere";
  }
}

class SplitProcesses : public testing::TestWithParam<const char*> {};

TEST_P(SplitProcesses, EqualTheUnsplitModelBitForBit) {
  const ZooModel& model = support::zoo_model(GetParam());
  SplitOptions options = support::kLastOfSeveral;
  std::vector<runtime::StageReport> reports;
  options.look = [&] { reports = support::stage_reports(); };
  OracleResult want = support::run_unsplit(model, static_cast<int>(config().microbatches), options);
  ZooModel made = model;
  made.make = [&](uint64_t seed) {
    const DelayParamInitialization delay(is_delayed);
    return model.make(seed);
  };
  OracleResult got = support::run_split(made, options);
  expect_all_held(got, want);
  std::erase_if(want.gradients, [&](const auto& item) { return got.gradients.count(item.first) == 0; });
  if (is_one_ulp_off && rank() == size() - 1) change_one_bit(got);
  support::expect_same_step(got, want, name_of_setting(model));
  for (const runtime::StageReport& report : reports) {
    EXPECT_EQ(report.num_taped > 0 && report.stays_on_autograd.empty(), config().stage == StageKind::kTape)
        << name_of_setting(model) << " " << report.stays_on_autograd;
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, SplitProcesses, testing::ValuesIn(kModels), [](const auto& test) { return test.param; });

}  // namespace
}  // namespace smp

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // An exception ends the job instead of one rank's test.
  GTEST_FLAG_SET(catch_exceptions, false);
  smp::is_one_ulp_off = argc > 1 && std::string(argv[1]) == "--one-ulp-off";
  smp::is_delayed = argc > 1 && std::string(argv[1]) == "--delayed";
  smp::init();
  const int failed = RUN_ALL_TESTS();
  smp::shutdown();
  return failed;
}
