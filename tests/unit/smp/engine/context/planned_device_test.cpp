// Plans for a kind of device that is not at hand.
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include "partitioner/cost/device_table.h"
#include "partitioner/partition/graph_costs.h"
#include "runtime/capture/body_capture.h"
#include "runtime/capture/interceptor.h"
#include "smp/engine/rank/rank_state.h"
#include "tests/support/language_model.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using namespace partitioner;

PartitionOptions options_of_job(const Config& config) {
  PartitionOptions options;
  tests::run_smp_ranks(1, config, [&] {
    DistributedModel model(tests::make_net());
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    step(tests::rows(4, 8, 1));
    const engine::RankState& rank = engine::rank_state("test");
    options = rank.programs.options(rank.models.all().front()->first_program->graph);
  });
  return options;
}

TEST(PlannedDevice, IsTheRanksOwnUnlessAnotherIsNamed) {
  EXPECT_EQ(options_of_job({}).machine.device, DeviceModel{});
  EXPECT_EQ(options_of_job({}).request.memory_limit_bytes, -1);
  const PartitionOptions planned = options_of_job({.planned_device = "NVIDIA H100 80GB HBM3"});
  EXPECT_EQ(planned.machine.device, device_model(*find_known_device("H100"), {}));
  EXPECT_EQ(planned.request.memory_limit_bytes, int64_t{79} << 30);
  EXPECT_EQ(options_of_job({.planned_device = "H100", .memory_limit_mb = 100}).request.memory_limit_bytes, 100 << 20);
}

TEST(PlannedDevice, HasTheSpeedThatItsSwitchesGiveIt) {
  const auto device_of = [](const Config& config) { return options_of_job(config).machine.device; };
  EXPECT_EQ(device_of({.cuda_graphs = CudaGraphs::kOff, .planned_device = "H100"}),
            device_model(*find_known_device("H100"), {.graphs = false}));
  at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, at::Float32Precision::TF32);
  const DeviceModel tf32 = device_of({.planned_device = "H100"});
  at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, at::Float32Precision::NONE);
  EXPECT_EQ(tf32, device_model(*find_known_device("H100"), {.tf32 = true}));
}

/// Forward and backward of one microbatch of the language model under bf16 autocast.
GraphCosts costs_of(const support::GptOptions& options, int64_t rows, const DeviceModel& device) {
  support::Gpt net(options, at::kCPU);
  std::vector<runtime::NamedTensor> named;
  for (const auto& item : net.named_parameters()) named.push_back({ValueKind::kParameter, item.key(), item.value()});
  const runtime::Bindings bindings(std::move(named));
  runtime::BodyCapture capture(bindings);
  const at::Tensor tokens = at::zeros({rows, options.tokens}, at::kLong);
  const std::vector<at::Tensor> ghosts = capture.begin({tokens, tokens}, "");
  at::Tensor loss;
  {
    const runtime::InterceptScope scope(capture);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    loss = net.forward(ghosts[0], ghosts[1]);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    capture.mark_backward(loss);
  }
  return graph_costs(capture.finish({loss}).recording->graph, device);
}

/// In milliseconds, of four microbatches. Each layer costs as much as every other.
double predicted_ms(support::GptOptions options, int64_t rows, const DeviceModel& device) {
  const int64_t layers = options.layers;
  options.layers = 1;
  const double one = costs_of(options, rows, device).total_us;
  options.layers = 2;
  const double two = costs_of(options, rows, device).total_us;
  return 4e-3 * (one + static_cast<double>(layers - 1) * (two - one));
}

// docs/compatibility.md, "On a GPU".
TEST(PlannedDevice, TakesAboutAsLongAsItWasMeasuredToTake) {
  const DeviceModel h100 = device_model(*find_known_device("H100"), {}),
                    without_graphs = device_model(*find_known_device("H100"), {.graphs = false});
  const auto expect_near = [](double predicted, double measured) {
    std::cout << predicted << " ms predicted, " << measured << " measured\n";
    EXPECT_LT(predicted, 1.3 * measured);
    EXPECT_GT(predicted, measured / 1.3);
  };
  expect_near(predicted_ms({.width = 256}, 8, h100), 10.4);
  expect_near(predicted_ms({.width = 256}, 8, without_graphs), 33.4);
  expect_near(predicted_ms({.width = 2048, .tokens = 1024}, 4, h100), 155.8);
}

}  // namespace
}  // namespace smp
