// Stages as tapes: the bits of the unsplit eager model, and a reason wherever autograd stays.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>

#include "smp/smp.h"
#include "tests/support/long_form.h"
#include "tests/support/model_zoo.h"
#include "tests/support/oracle.h"
#include "tests/support/random_graph.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

using runtime::StageReport;
using support::OracleResult;
using support::PipelineRun;
using support::ZooModel;

PipelineRun run_with(StageKind kind, const ZooModel& model, int ranks, int microbatches) {
  const Config config{.microbatches = microbatches, .stage = kind, .log_level = LogLevel::kOff};
  return support::run_on_pipeline(model, ranks, config, {.steps = support::kStepsToTape});
}

class Tape : public testing::TestWithParam<ZooModel> {};

TEST_P(Tape, EqualsTheUnsplitModelBitForBit) {
  const ZooModel& model = GetParam();
  at::set_num_threads(1);
  for (const int microbatches : {1, 4}) {
    const OracleResult want = support::run_unsplit(model, microbatches, {.steps = support::kStepsToTape});
    for (const int ranks : {1, 2, 3}) {
      const PipelineRun run = run_with(StageKind::kTape, model, ranks, microbatches);
      support::expect_same_step(run.result, want, std::to_string(ranks) + " ranks");
      EXPECT_TRUE(run.is_taped()) << run.reasons();
    }
  }
}

TEST_P(Tape, IsNotMadeWhereAutogradIsAskedFor) {
  const ZooModel& model = GetParam();
  at::set_num_threads(1);
  const PipelineRun run = run_with(StageKind::kAutograd, model, 2, 4);
  support::expect_same_step(run.result, support::run_unsplit(model, 4, {.steps = support::kStepsToTape}), "autograd");
  for (const StageReport& report : run.reports) {
    EXPECT_EQ(report.num_taped, 0);
    EXPECT_EQ(report.stays_on_autograd, "") << "nothing that was to be taped";
  }
}

TEST(TapePlan, SaysWhereAutogradIsAskedFor) {
  tests::run_smp_ranks(1, {.microbatches = 2, .stage = StageKind::kAutograd, .log_level = LogLevel::kOff}, [] {
    DistributedModel model(torch::nn::Linear(4, 2));
    auto train_step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).sum();
      model.backward(loss);
      return loss;
    });
    train_step(torch::ones({2, 4}));
    EXPECT_TRUE(model.plan_text().ends_with("\nstage 0 stays on autograd: stage: autograd\n")) << model.plan_text();
  });
}

TEST(TapeOrder, GradientsThatLeaveComeBeforeThoseOfParameters) {
  at::set_num_threads(1);
  for (const char* name : {"gpt", "resnet"}) {
    const PipelineRun alone = run_with(StageKind::kTape, support::zoo_model(name), 1, 4);
    for (const StageReport& report : alone.reports) EXPECT_EQ(report.num_weight_calls, 0U) << name;
    const PipelineRun two = run_with(StageKind::kTape, support::zoo_model(name), 2, 4);
    ASSERT_EQ(two.reports.size(), 2U);
    std::vector<size_t> rests{two.reports[0].num_weight_calls, two.reports[1].num_weight_calls};
    std::sort(rests.begin(), rests.end());  // in which order the ranks have reported is not known
    EXPECT_EQ(rests[0], 0U) << name << ": the first stage sends none";
    EXPECT_GT(rests[1], 0U) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, Tape, testing::ValuesIn(support::model_zoo()),
                         [](const testing::TestParamInfo<ZooModel>& test) { return test.param.name; });

// Writes in place, through views too; values shared by several readers; several results and losses; dropouts.
TEST(TapeRandomGraphs, EqualTheUnsplitModelOrSayWhyTheyAreNotTaped) {
  const int num_graphs = support::num_random(500);
  at::set_num_threads(1);
  int num_taped = 0;
  for (uint64_t seed = 0; seed < static_cast<uint64_t>(num_graphs); ++seed) {
    const ZooModel model =
        support::random_graph(seed, {.with_tied_weights = seed % 4 == 0, .with_more_losses = seed % 2 == 0});
    const int microbatches = 1 + static_cast<int>(seed / 2 % 2) * 3, ranks = 1 + static_cast<int>(seed % 3 == 0);
    const PipelineRun run = run_with(StageKind::kTape, model, ranks, microbatches);
    support::expect_same_step(run.result, support::run_unsplit(model, microbatches, {.steps = support::kStepsToTape}),
                              "seed " + std::to_string(seed));
    num_taped += run.is_taped();
    if (run.is_taped()) continue;
    EXPECT_NE(run.reasons(), "; ") << "seed " << seed;
    std::cout << "seed " << seed << ": " << run.reasons() << '\n';
  }
  EXPECT_GE(num_taped, num_graphs * 95 / 100);
}

at::Tensor opaque_tanh(const at::Tensor& x) {
  return opaque([](at::Tensor t) { return t.tanh(); }, x);
}

// Tapes on both sides of what is not taped: values and gradients cross between them, parameters are shared.
TEST(TapeRandomGraphs, EqualTheUnsplitModelInSegments) {
  const int num_graphs = support::num_random(200);
  at::set_num_threads(1);
  int num_in_segments = 0;
  for (uint64_t seed = 0; seed < static_cast<uint64_t>(num_graphs); ++seed) {
    const ZooModel model = support::random_graph(
        seed,
        {.operations = 36, .with_tied_weights = seed % 4 == 0, .with_more_losses = seed % 2 == 0, .tanh = opaque_tanh});
    const int microbatches = 1 + static_cast<int>(seed / 2 % 2) * 3, ranks = 1 + static_cast<int>(seed % 3 == 0);
    const PipelineRun run = run_with(StageKind::kTape, model, ranks, microbatches);
    support::expect_same_step(run.result, support::run_unsplit(model, microbatches, {.steps = support::kStepsToTape}),
                              "seed " + std::to_string(seed));
    num_in_segments += std::any_of(run.reports.begin(), run.reports.end(), [](const StageReport& report) {
      return report.num_taped > 0 && report.stays_on_autograd.find(" operators)") != std::string::npos;
    });
  }
  std::cout << num_in_segments << " of " << num_graphs << " in segments\n";
  EXPECT_GE(num_in_segments, num_graphs / 2);
}

}  // namespace
}  // namespace smp
