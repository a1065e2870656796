// Every model of the zoo, split: bit-equal to the unsplit model.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>

#include "smp/engine/rank/rank_state.h"
#include "smp/smp.h"
#include "tests/support/long_form.h"
#include "tests/support/model_zoo.h"
#include "tests/support/model_zoo_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/random_graph.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

using support::kLastOfSeveral;
using support::OracleResult;
using support::PipelineRun;
using support::ZooModel;

void expect_as_unsplit(const ZooModel& model, int ranks, const Config& config, const OracleResult& want) {
  const PipelineRun run = support::run_on_pipeline(model, ranks, config, kLastOfSeveral);
  const std::string what = std::to_string(config.microbatches) + " microbatches";
  support::expect_same_step(run.result, want, what);
  EXPECT_EQ(run.is_taped(), config.stage == StageKind::kTape) << what << ": " << run.reasons();
  EXPECT_GE(run.reports.size(), static_cast<size_t>(ranks + (ranks > 1 && config.virtual_stages > 1 ? 1 : 0)));
}

/// What runs on every number of stages are compared with.
const OracleResult& unsplit(const ZooModel& model, int microbatches) {
  static std::map<std::pair<std::string, int>, OracleResult> results;
  const auto [at, is_new] = results.try_emplace({model.name, microbatches});
  if (is_new) at->second = support::run_unsplit(model, microbatches, kLastOfSeveral);
  return at->second;
}

class Split : public testing::TestWithParam<std::tuple<ZooModel, int>> {};

TEST_P(Split, EqualsTheUnsplitModelBitForBit) {
  const auto& [model, stages] = GetParam();
  at::set_num_threads(1);
  for (const int m : {0, 1, 2, 3}) {
    const int microbatches = std::array{1, 2, 5, 8}[static_cast<size_t>(m)];
    for (const int p : {0, 1}) {
      for (const int k : {0, 1}) {
        // The short form has each of a pair of choices together, whichever the pair, but not all four.
        if (!support::is_long() && (p != (m + stages) % 2 || k != (m / 2 + stages) % 2)) continue;
        const Config config{.microbatches = microbatches,
                            .pipeline = p == 0 ? Pipeline::kInterleaved : Pipeline::kSimple,
                            .stage = k == 0 ? StageKind::kTape : StageKind::kAutograd};
        expect_as_unsplit(model, stages, config, unsplit(model, microbatches));
      }
    }
  }
}

TEST_P(Split, EqualsTheUnsplitModelBitForBitWithTwoVisitsOfEachRank) {
  const auto& [model, ranks] = GetParam();
  if (ranks == 1) return;
  at::set_num_threads(1);
  for (const int microbatches : {5, 8}) {  // 8: in full groups on 2 and 4 ranks
    for (const int p : {0, 1}) {
      if (!support::is_long() && p != (microbatches + ranks) % 2) continue;
      const Config config{.microbatches = microbatches,
                          .pipeline = p == 0 ? Pipeline::kInterleaved : Pipeline::kSimple,
                          .virtual_stages = 2};
      expect_as_unsplit(model, ranks, config, unsplit(model, microbatches));
    }
  }
}

/// Layers that take long beside a message.
struct WideLayers : torch::nn::SequentialImpl {
  static constexpr int64_t kWidth = 512;
  WideLayers() {
    for (int i = 0; i < 12; ++i) push_back(torch::nn::Linear(kWidth, kWidth));
  }
};

ZooModel wide_layers() {
  return {.name = "wide_layers",
          .make = support::maker<WideLayers>(),
          .make_inputs =
              [](int64_t batch, uint64_t seed) {
                support::InputSource from(seed);
                return std::vector<at::Tensor>{from.normal({16 * batch, WideLayers::kWidth})};
              },
          .forward =
              [](torch::nn::Module& module, const std::vector<at::Tensor>& x) {
                return std::vector<at::Tensor>{support::as<WideLayers>(module).forward(x[0])};
              },
          .loss =
              [](const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>&) {
                return support::BodyResult{.loss = outputs[0].square().mean(), .outputs = outputs};
              }};
}

TEST(SplitVisits, ThatThePlannerChoosesEqualTheUnsplitModelBitForBit) {
  at::set_num_threads(1);
  const ZooModel model = wide_layers();
  const PipelineRun run =
      support::run_on_pipeline(model, 2, {.microbatches = 4, .virtual_stages = kAutoVirtualStages}, kLastOfSeveral);
  EXPECT_GE(run.reports.size(), 4U);
  EXPECT_TRUE(run.is_taped()) << run.reasons();
  support::expect_same_step(run.result, support::run_unsplit(model, 4, kLastOfSeveral), "chosen visits");
}

std::string name_of(const testing::TestParamInfo<Split::ParamType>& test) {
  return std::get<0>(test.param).name + "_on_" + std::to_string(std::get<1>(test.param));
}

INSTANTIATE_TEST_SUITE_P(Zoo, Split, testing::Combine(testing::ValuesIn(support::model_zoo()), testing::Values(1, 2, 3, 4)),
                         name_of);

// Branches that the program interleaves, sums of three and more gradients, values read far away: what another order of
// the operators than the program's could add up differently.
TEST(SplitRandomGraphs, EqualTheUnsplitModelBitForBit) {
  at::set_num_threads(1);
  int num_reordered = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const ZooModel model = support::random_graph(seed);
    const OracleResult want = support::run_unsplit(model, 2);
    for (const int stages : {2, 3, 4}) {
      if (!support::is_long() && stages != 2 + static_cast<int>(seed % 3)) continue;
      std::atomic<bool> is_reordered = false;
      const auto look = [&] {
        const auto& plan = engine::rank_state("test").models.all().front()->first_program->plan;
        if (!std::is_sorted(plan.stage_of_node.begin(), plan.stage_of_node.end())) is_reordered = true;
      };
      const OracleResult got = support::run_on_pipeline(model, stages, {.microbatches = 2}, {.look = look}).result;
      num_reordered += is_reordered;
      support::expect_same_step(got, want, "seed " + std::to_string(seed) + " on " + std::to_string(stages));
    }
  }
  EXPECT_GT(num_reordered, 0);
}

}  // namespace
}  // namespace smp
