// What a program does between steps with memory that graphs read and write: the numbers stay those of the tape.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "runtime/device/device.h"
#include "runtime/device/random.h"
#include "smp/smp.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

namespace nn = torch::nn;

constexpr int64_t kFeatures = 16, kExamples = 8;
constexpr int kStepsInAll = 10;

struct Net : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  nn::Linear first = register_module("first", nn::Linear(kFeatures, kFeatures));
  nn::Linear second = register_module("second", nn::Linear(kFeatures, kFeatures));
};

using Change = std::function<void(Net& net)>;  // behind a step

struct Seen {
  std::vector<at::Tensor> numbers{};  // losses and gradients of each step
  runtime::StageReport report{};
};

Seen run(CudaGraphs graphs, const Change& change) {
  Seen seen;
  const Config config{.microbatches = 2, .device = DeviceKind::kCuda, .cuda_graphs = graphs, .log_level = LogLevel::kOff};
  tests::run_smp_ranks(1, config, [&] {
    std::optional<runtime::GeneratorHold> seeded(3);
    const auto net = std::make_shared<Net>();
    seeded.reset();
    DistributedModel<Net> model(net);
    auto step = smp::step([&](at::Tensor rows) {
      const at::Tensor loss = model(rows).square().mean();
      model.backward(loss);
      return loss;
    });
    for (int i = 0; i < kStepsInAll; ++i) {
      net->zero_grad();
      const StepOutput losses = step(torch::full({kExamples, kFeatures}, 0.1 * (i + 1)));
      seen.numbers.push_back(losses.reduce_mean().cpu());
      for (const at::Tensor& parameter : net->parameters()) seen.numbers.push_back(parameter.grad().cpu());
      const at::NoGradGuard no_grad;
      change(*net);
    }
    seen.report = support::stage_reports().at(0);
  });
  return seen;
}

void expect_numbers_of_the_tape(const Change& change) {
  const Seen got = run(CudaGraphs::kAuto, change), want = run(CudaGraphs::kOff, change);
  EXPECT_GT(got.report.num_taped, 0) << got.report.stays_on_autograd;
  ASSERT_EQ(got.numbers.size(), want.numbers.size());
  for (size_t i = 0; i < got.numbers.size(); ++i) EXPECT_TRUE(at::equal(got.numbers[i], want.numbers[i])) << i;
}

TEST(MemoryOfGraphs, MayGoFromTheGradientsThatTheyAddTo) {
  expect_numbers_of_the_tape([](Net& net) {
    for (const at::Tensor& parameter : net.parameters()) parameter.grad().set_data(parameter.grad() * 0.5);
  });
  expect_numbers_of_the_tape([](Net& net) { net.first->weight.grad().t_(); });
}

// As the storage of a parameter is resized, and back.
TEST(MemoryOfGraphs, MayGoFromTheParametersThatTheyRead) {
  expect_numbers_of_the_tape([](Net& net) {
    const at::Tensor fresh = net.first->weight.detach() * 0.9;
    const c10::Storage storage = net.first->weight.storage();
    c10::DataPtr elsewhere = runtime::this_ranks_device().allocate(static_cast<int64_t>(storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(elsewhere));
    net.first->weight.detach().copy_(fresh);
  });
}

}  // namespace
}  // namespace smp
