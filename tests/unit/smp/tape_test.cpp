// Stages as tapes: the bits of the unsplit eager model, and a reason wherever autograd stays.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <mutex>

#include "smp/detail/conductor.h"
#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/model_zoo.h"
#include "tests/support/oracle.h"
#include "tests/support/random_graph.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

using runtime::StageReport;
using support::OracleResult;
using support::ZooModel;

constexpr int kNumSteps = 4;
constexpr int kMoreSteps = 8;  // two to find out what is not taped, twice, and two to record the rest

struct TapedRun {
  OracleResult result;
  std::vector<StageReport> reports;  // of all stages of all ranks
};

TapedRun run_with(StageKind kind, const ZooModel& model, int ranks, int microbatches, int steps = kNumSteps) {
  std::mutex mutex;
  TapedRun run;
  const Config config{.microbatches = microbatches, .stage = kind, .seed = support::kSplitBaseSeed, .log_level = LogLevel::kOff};
  tests::run_smp_ranks(ranks, config, [&] {
    std::vector<StageReport> reports;
    const auto look = [&] {
      for (const auto& [index, stage] : detail::conductor("test").models().all().front()->first_program->rank_program.stages) {
        reports.push_back(stage->report());
      }
    };
    const OracleResult mine = support::run_split(model, {.look = look, .steps = steps});
    const std::lock_guard<std::mutex> lock(mutex);
    run.reports.insert(run.reports.end(), reports.begin(), reports.end());
    run.result.losses = mine.losses;
    run.result.outputs = mine.outputs;
    run.result.buffers = mine.buffers;
    for (const auto& [name, gradient] : mine.gradients) run.result.gradients[name] = gradient;
  });
  return run;
}

// Over several steps the gradients of a parameter with several owners are summed over them first, and then added.
double tolerance(const ZooModel& model, int ranks) {
  return model.name == "transformer" && ranks > 1 ? 1e-6 : support::gradient_tolerance(model, ranks);
}

bool is_taped(const TapedRun& run) {
  return std::all_of(run.reports.begin(), run.reports.end(), [](const StageReport& report) {
    return report.num_taped > 0 && report.stays_on_autograd.empty();
  });
}

std::string reasons(const TapedRun& run) {
  std::string text;
  for (const StageReport& report : run.reports) text += report.stays_on_autograd + "; ";
  return text;
}

class Tape : public testing::TestWithParam<ZooModel> {};

TEST_P(Tape, EqualsTheUnsplitModelBitForBit) {
  const ZooModel& model = GetParam();
  at::set_num_threads(1);
  for (const int microbatches : {1, 4}) {
    const OracleResult want = support::run_unsplit(model, microbatches, {.steps = kNumSteps});
    for (const int ranks : {1, 2, 3}) {
      const TapedRun run = run_with(StageKind::kTape, model, ranks, microbatches);
      support::expect_same_step(run.result, want, std::to_string(ranks) + " ranks", tolerance(model, ranks));
      EXPECT_TRUE(is_taped(run)) << reasons(run);
    }
  }
}

TEST_P(Tape, IsNotMadeWhereAutogradIsAskedFor) {
  const ZooModel& model = GetParam();
  at::set_num_threads(1);
  const TapedRun run = run_with(StageKind::kAutograd, model, 2, 4);
  support::expect_same_step(run.result, support::run_unsplit(model, 4, {.steps = kNumSteps}), "autograd",
                            tolerance(model, 2));
  for (const StageReport& report : run.reports) EXPECT_EQ(report.num_taped, 0);
}

TEST(TapeOrder, GradientsThatLeaveComeBeforeThoseOfParameters) {
  at::set_num_threads(1);
  for (const char* name : {"gpt", "resnet"}) {
    const TapedRun alone = run_with(StageKind::kTape, support::zoo_model(name), 1, 4);
    for (const StageReport& report : alone.reports) EXPECT_EQ(report.num_rest_calls, 0U) << name;
    const TapedRun two = run_with(StageKind::kTape, support::zoo_model(name), 2, 4);
    ASSERT_EQ(two.reports.size(), 2U);
    std::vector<size_t> rests{two.reports[0].num_rest_calls, two.reports[1].num_rest_calls};
    std::sort(rests.begin(), rests.end());  // in which order the ranks have reported is not known
    EXPECT_EQ(rests[0], 0U) << name << ": the first stage sends none";
    EXPECT_GT(rests[1], 0U) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, Tape, testing::ValuesIn(support::model_zoo()),
                         [](const testing::TestParamInfo<ZooModel>& test) { return test.param.name; });

// Writes in place, through views too; values shared by several readers; several results and losses; dropouts.
TEST(TapeRandomGraphs, EqualTheUnsplitModelOrSayWhyTheyAreNotTaped) {
  constexpr int kNumGraphs = 500;
  at::set_num_threads(1);
  int num_taped = 0;
  for (uint64_t seed = 0; seed < kNumGraphs; ++seed) {
    const ZooModel model = support::random_graph(
        seed, {.with_tied_weights = seed % 4 == 0, .with_more_losses = seed % 2 == 0});
    const int microbatches = 1 + static_cast<int>(seed / 2 % 2) * 3, ranks = 1 + static_cast<int>(seed % 3 == 0);
    const TapedRun run = run_with(StageKind::kTape, model, ranks, microbatches);
    support::expect_same_step(run.result, support::run_unsplit(model, microbatches, {.steps = kNumSteps}),
                              "seed " + std::to_string(seed), support::gradient_tolerance(model, ranks));
    num_taped += is_taped(run);
    if (is_taped(run)) continue;
    EXPECT_NE(reasons(run), "; ") << "seed " << seed;
    std::cout << "seed " << seed << ": " << reasons(run) << '\n';
  }
  EXPECT_GE(num_taped, kNumGraphs * 95 / 100);
}

at::Tensor opaque_tanh(const at::Tensor& x) {
  return opaque([](at::Tensor t) { return t.tanh(); }, x);
}

// Tapes on both sides of what is not taped: values and gradients cross between them, parameters are shared.
TEST(TapeRandomGraphs, EqualTheUnsplitModelInSegments) {
  constexpr int kNumGraphs = 200;
  at::set_num_threads(1);
  int num_in_segments = 0;
  for (uint64_t seed = 0; seed < kNumGraphs; ++seed) {
    const ZooModel model = support::random_graph(
        seed, {.operations = 36, .with_tied_weights = seed % 4 == 0, .with_more_losses = seed % 2 == 0, .tanh = opaque_tanh});
    const int microbatches = 1 + static_cast<int>(seed / 2 % 2) * 3, ranks = 1 + static_cast<int>(seed % 3 == 0);
    const TapedRun run = run_with(StageKind::kTape, model, ranks, microbatches, kMoreSteps);
    support::expect_same_step(run.result, support::run_unsplit(model, microbatches, {.steps = kMoreSteps}),
                              "seed " + std::to_string(seed), support::gradient_tolerance(model, ranks));
    num_in_segments += std::any_of(run.reports.begin(), run.reports.end(), [](const StageReport& report) {
      return report.num_taped > 0 && report.stays_on_autograd.find(" operators)") != std::string::npos;
    });
  }
  std::cout << num_in_segments << " of " << kNumGraphs << " in segments\n";
  EXPECT_GE(num_in_segments, kNumGraphs / 2);
}

}  // namespace
}  // namespace smp
