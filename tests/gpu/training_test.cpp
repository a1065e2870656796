// Many steps on a GPU: the losses of the CPU, and no memory that grows.
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <stdexcept>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/device/random.h"
#include "smp/smp.h"
#include "tests/gpu/on_gpu.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 32, kClasses = 10, kRows = 32;

// Draws no random numbers: those of a GPU are others.
std::shared_ptr<nn::SequentialImpl> make_net(int64_t hidden) {
  const runtime::GeneratorHold seeded(3);  // ranks that are threads share the generator
  nn::Sequential net(nn::Linear(kWidth, hidden), nn::GELU(), nn::LayerNorm(nn::LayerNormOptions({hidden})),
                     nn::Linear(hidden, hidden), nn::Tanh(), nn::BatchNorm1d(hidden), nn::Linear(hidden, kClasses));
  return net.ptr();
}

struct Files {
  std::string load_from{}, save_to{};  // before the first step, behind the last
};

std::vector<double> losses_on(DeviceKind device, int ranks, int steps, const std::function<void(int step)>& look = {},
                              const Files& files = {}, int replicas = 1, Config config = {}) {
  std::vector<double> losses;
  config.pipeline_parallel_degree = ranks / replicas;
  config.microbatches = 4;
  config.device = device;
  config.bucket_cap_mb = 1;
  tests::run_smp_ranks(ranks, config, [&] {
    const auto net = make_net(replicas > 1 ? 1024 : 64);  // several buckets, which leave while the backward goes on
    DistributedModel<nn::SequentialImpl> model(net);
    DistributedOptimizer optimizer(torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(1e-3)), model);
    auto step = smp::step([&](at::Tensor rows, at::Tensor classes) {
      const at::Tensor loss = torch::nll_loss(torch::log_softmax(model(rows), 1), classes);
      model.backward(loss);
      return loss;
    });
    auto generator = at::make_generator<at::CPUGeneratorImpl>(17);
    const auto own = [&](const at::Tensor& batch) { return batch.chunk(replicas)[static_cast<size_t>(dp_rank())]; };
    const at::Tensor rows = own(torch::randn({kRows, kWidth}, generator));
    const at::Tensor classes = own(torch::randint(kClasses, {kRows}, generator, torch::TensorOptions(torch::kLong)));
    if (!files.load_from.empty()) load_state(files.load_from, model, optimizer);
    for (int i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      const StepOutput loss = step(rows, classes);
      optimizer.step();
      if (rank() == 0) losses.push_back(loss.reduce_mean().item<double>());
      if (rank() == 0 && look) look(i);
    }
    if (!files.save_to.empty()) save_state(files.save_to, model, optimizer);
  });
  return losses;
}

TEST(TrainingOnGpu, HasTheLossesOfTheCpu) {
  constexpr int kSteps = 50;
  const std::vector<double> want = losses_on(DeviceKind::kCpu, 1, kSteps);
  EXPECT_LT(want.back(), 0.8 * want.front());
  for (const int ranks : {1, 2}) {
    const std::vector<double> got = losses_on(DeviceKind::kCuda, ranks, kSteps);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-3 * want[i]) << "step " << i;
  }
}

auto step_of(DistributedModel<nn::SequentialImpl>& model) {
  return smp::step([&model](at::Tensor rows) {
    const at::Tensor loss = model(rows).square().mean();
    model.backward(loss);
    return loss;
  });
}

// The copy of pinned memory to a GPU waits for nobody.
TEST(TrainingOnGpu, LetsTheProgramWriteToItsBatchBehindAStep) {
  constexpr int kSteps = 12;
  const auto losses = [](bool writes) {
    std::vector<double> found;
    // Looking at losses would wait for the device.
    const Config config{.microbatches = 2, .device = DeviceKind::kCuda, .nonfinite = Nonfinite::kIgnore};
    tests::run_smp_ranks(1, config, [&] {
      const auto net = make_net(64);
      DistributedModel<nn::SequentialImpl> model(net);
      auto step = step_of(model);
      for (int i = 0; i < kSteps; ++i) {
        at::Tensor rows = torch::full({kRows, kWidth}, 0.1 * i, at::TensorOptions().pinned_memory(true));
        const StepOutput loss = step(rows);
        if (writes) rows.fill_(1e9);
        found.push_back(loss.reduce_mean().item<double>());
      }
    });
    return found;
  };
  EXPECT_EQ(losses(true), losses(false));
}

TEST(TrainingOnGpu, HasTheSameLossesWhereItsOperatorsWereTimed) {
  constexpr int kSteps = 12, kRanks = 2;
  const Config timed{.cost = CostSource::kMeasured, .cost_cache = "off"};
  EXPECT_EQ(losses_on(DeviceKind::kCuda, kRanks, kSteps, {}, {}, 1, timed), losses_on(DeviceKind::kCuda, kRanks, kSteps));
}

TEST(TrainingOnGpu, HasTheLossesOfReplicasOnTheCpu) {
  constexpr int kSteps = 20, kReplicas = 2;
  for (const int ranks : {2, 4}) {
    const std::vector<double> want = losses_on(DeviceKind::kCpu, ranks, kSteps, {}, {}, kReplicas);
    const std::vector<double> got = losses_on(DeviceKind::kCuda, ranks, kSteps, {}, {}, kReplicas);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-3 * want[i]) << ranks << " ranks, step " << i;
  }
}

// Their graphs would write to them again.
TEST(TrainingOnGpu, LeavesGradientsThatSomebodyKeeps) {
  constexpr int kSteps = 24;
  tests::run_smp_ranks(1, {.microbatches = 4, .device = DeviceKind::kCuda}, [&] {
    const auto net = make_net(64);
    DistributedModel<nn::SequentialImpl> model(net);
    auto step = step_of(model);
    std::vector<at::Tensor> kept, copies;
    for (int i = 0; i < kSteps; ++i) {
      for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
      step(torch::full({kRows, kWidth}, 0.1 * i));
      if (i % 3 > 0) continue;
      for (const at::Tensor& parameter : net->parameters()) kept.push_back(parameter.grad());
      for (size_t at = copies.size(); at < kept.size(); ++at) copies.push_back(kept[at].clone());
    }
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], copies[i])) << i;
  });
}

// A program's kernel, and what else it does.
std::function<void()> at_each_call;
at::Tensor doubled(const at::Tensor& x) {
  at_each_call();
  return x * 2;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("special_i1e", doubled); }

// No recording can hold it, and it says so in its own way.
void wait_for_device() {
  const runtime::Device& device = runtime::this_ranks_device();
  try {
    device.wait(device.record());
  } catch (const c10::Error&) {
    throw std::runtime_error("wait_for_device cannot wait here");
  }
}

TEST(TrainingOnGpu, GoesOnFromTapesWhereARecordingFailsByAnErrorOfTheProgram) {
  at_each_call = wait_for_device;
  tests::run_smp_ranks(1, {.microbatches = 4, .device = DeviceKind::kCuda, .log_level = LogLevel::kOff}, [&] {
    const auto net = make_net(64);
    DistributedModel<nn::SequentialImpl> model(net);
    auto step = smp::step([&](at::Tensor rows) {
      const at::Tensor loss = model(at::special_i1e(rows)).square().mean();
      model.backward(loss);
      return loss;
    });
    const at::Tensor rows = torch::full({kRows, kWidth}, 0.1);
    double first = 0;
    for (int i = 0; i < 8; ++i) {
      net->zero_grad();
      const auto loss = step(rows).reduce_mean().item<double>();
      if (i == 0) first = loss;
      EXPECT_EQ(loss, first);
    }
    const auto reports = support::stage_reports();
    EXPECT_NE(reports.at(0).stays_off_graphs.find("cannot wait here"), std::string::npos) << reports.at(0).stays_off_graphs;
    EXPECT_GT(reports.at(0).num_taped, 0);
  });
}

// Whichever call of the kernel it is: one in a recording, of a forward or of a backward, or one whose error the program
// gets.
TEST(TrainingOnGpu, RecordsAgainWhereARecordingFindsNoMemory) {
  constexpr int kSteps = 8;
  int num_recorded_again = 0, num_thrown = 0, num_calls = 0;
  std::vector<double> want;
  for (int failing = 0; failing <= num_calls || failing == 0; ++failing) {
    int calls = 0;
    at_each_call = [&] {
      if (++calls == failing) throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "no memory is left");
    };
    std::vector<double> losses;
    try {
      tests::run_smp_ranks(1, {.device = DeviceKind::kCuda, .log_level = LogLevel::kOff}, [&] {
        const auto net = make_net(64);
        DistributedModel<nn::SequentialImpl> model(net);
        DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
        auto step = smp::step([&](at::Tensor rows) {  // the gradient of i0e calls the kernel, too
          const at::Tensor loss = at::special_i0e(model(at::special_i1e(rows))).square().mean();
          model.backward(loss);
          return loss;
        });
        for (int i = 0; i < kSteps; ++i) {
          optimizer.zero_grad();
          losses.push_back(step(torch::full({kRows, kWidth}, 0.1)).reduce_mean().item<double>());
          optimizer.step();
        }
        const auto report = support::stage_reports().at(0);
        EXPECT_EQ(report.stays_off_graphs, "") << failing;
        EXPECT_GT(report.num_replayed, 0) << failing;
      });
    } catch (const c10::OutOfMemoryError&) {
      ++num_thrown;
      continue;
    }
    if (failing == 0) {
      num_calls = calls;
      want = losses;
    } else {
      ++num_recorded_again;
    }
    EXPECT_EQ(losses, want) << failing;
  }
  EXPECT_EQ(num_recorded_again, 2);
  EXPECT_GT(num_thrown, 2);
}

void set_tf32(bool is_on) {
  at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL,
                                          is_on ? at::Float32Precision::TF32 : at::Float32Precision::IEEE);
}

// A graph holds the kernels of the switch that it was recorded under.
TEST(TrainingOnGpu, FollowsTf32FromStepToStepFromGraphsToo) {
  const auto losses = [](CudaGraphs graphs, bool turns) {
    const auto look = [turns](int step) { set_tf32(turns && (step / 5) % 2 == 0); };
    std::vector<double> found = losses_on(DeviceKind::kCuda, 1, 20, look, {}, 1, {.cuda_graphs = graphs});
    set_tf32(false);
    return found;
  };
  const std::vector<double> want = losses(CudaGraphs::kOff, true);
  EXPECT_EQ(losses(CudaGraphs::kAuto, true), want);
  EXPECT_NE(losses(CudaGraphs::kAuto, false), want);
}

TEST(TrainingOnGpu, TakesNoMoreMemoryAfterAThousandSteps) {
  int64_t early = 0, late = 0;
  losses_on(DeviceKind::kCuda, 1, 1000, [&](int step) {
    if (step == 99) early = runtime::this_ranks_device().free_bytes();
    if (step == 999) late = runtime::this_ranks_device().free_bytes();
  });
  EXPECT_GE(late, early) << early - late << " bytes fewer are free";
}

TEST(StateOfAGpu, IsOnTheHostInFilesAndGoesOnAnywhere) {
  const std::string folder = testing::TempDir() + "smp_gpu_state";
  constexpr int kBefore = 12, kAfter = 8;
  std::filesystem::remove_all(folder);
  losses_on(DeviceKind::kCuda, 2, kBefore, {}, {.save_to = folder});
  const std::vector<double> whole = losses_on(DeviceKind::kCuda, 2, kBefore + kAfter);
  const std::vector<double> want(whole.begin() + kBefore, whole.end());
  for (const int ranks : {1, 2}) {
    EXPECT_EQ(losses_on(DeviceKind::kCuda, ranks, kAfter, {}, {.load_from = folder}), want) << ranks << " ranks";
  }
  const std::vector<double> on_cpu = losses_on(DeviceKind::kCpu, 1, kAfter, {}, {.load_from = folder});
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(on_cpu[i], want[i], 1e-3 * want[i]) << "step " << i;
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace smp
