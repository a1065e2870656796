// Models of the zoo on a GPU: losses, outputs and gradients of the unsplit model there, bit for bit, on 1, 2 and 4 stages
// that are threads on the one device.
#include <gtest/gtest.h>

#include "tests/gpu/on_gpu.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

using support::OracleResult;
using support::PipelineRun;
using support::SplitOptions;
using support::ZooModel;

constexpr int kMicrobatches = 4;

// Its upsampling has no deterministic backward: no two runs have the same bits.
bool has_bits(const ZooModel& model) { return model.name != "unet"; }
// cuDNN's LSTM lays its weights out anew where they are not in one block, which no tape records.
bool is_tapeable(const ZooModel& model) { return model.name != "lstm" && has_bits(model); }
// An attention with dropout keeps its seed on the host, or in a graph on the device. (Stages without one have graphs.)
bool has_graphs(const ZooModel& model) { return model.name != "gpt"; }

class OnGpu : public testing::TestWithParam<ZooModel> {
 protected:
  void expect_oracle(StageKind stage, CudaGraphs graphs, const SplitOptions& options) {
    const ZooModel& model = GetParam();
    const tests::DeterministicAlgorithms deterministic;
    const OracleResult want = support::run_unsplit(model, kMicrobatches, options);
    for (const int ranks : {1, 2, 4}) {
      const std::string what = model.name + " on " + std::to_string(ranks);
      const Config config{.microbatches = kMicrobatches,
                          .stage = stage,
                          .device = DeviceKind::kCuda,
                          .cuda_graphs = graphs,
                          .log_level = LogLevel::kOff};
      const PipelineRun run = support::run_on_pipeline(model, ranks, config, options);
      support::expect_same_step(run.result, want, what, has_bits(model) ? 0.0 : 1e-5);
      for (const at::Tensor& loss : run.result.losses) EXPECT_TRUE(loss.is_cuda()) << what;
      if (stage == StageKind::kAutograd || !is_tapeable(model)) continue;
      EXPECT_TRUE(run.is_taped()) << what << ": " << run.reasons();
      for (const runtime::StageReport& report : run.reports) {
        const bool should_replay = graphs == CudaGraphs::kAuto && (has_graphs(model) || report.stays_off_graphs.empty());
        EXPECT_EQ(report.num_replayed > 0, should_replay) << what << ": " << report.stays_off_graphs;
      }
    }
  }
};

TEST_P(OnGpu, EqualsTheUnsplitModelUnderAutograd) { expect_oracle(StageKind::kAutograd, CudaGraphs::kOff, {.steps = 1}); }

TEST_P(OnGpu, EqualsTheUnsplitModelFromTapes) {
  expect_oracle(StageKind::kTape, CudaGraphs::kOff, {.steps = support::kStepsToTape});
}

// Twice as long: a graph is recorded for each microbatch in flight, and runs again in the next step.
TEST_P(OnGpu, EqualsTheUnsplitModelFromGraphs) {
  expect_oracle(StageKind::kTape, CudaGraphs::kAuto, {.steps = 2 * support::kStepsToTape, .clears_gradients = true});
}

INSTANTIATE_TEST_SUITE_P(Zoo, OnGpu, testing::ValuesIn(support::model_zoo()),
                         [](const testing::TestParamInfo<ZooModel>& test) { return test.param.name; });

}  // namespace
}  // namespace smp
