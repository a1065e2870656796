// Message buffers of a pipeline in training and evaluation, over the loopback and over MPI: how many each edge takes, and
// that none is made once the tables are.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "runtime/executor/executor.h"
#include "smp/engine/context/context.h"
#include "smp/smp.h"
#include "tests/support/smp_ranks.h"

namespace smp {
namespace {

constexpr int64_t kMicrobatches = 12, kRows = 64, kSlowWidth = 512,
                  kWidth = 128;  // messages of 32 KB: MPI sends them when they are wanted
constexpr int kUnderMpirun = 0;

void on_ranks(int world, const std::function<void()>& fn) {
  const Config config{.microbatches = kMicrobatches, .auto_partition = false, .log_level = LogLevel::kOff};
  if (world != kUnderMpirun) return tests::run_smp_ranks(world, config, fn);
  smp::init(config);
  fn();
  smp::shutdown();
}

// One layer per stage; the last one takes its time, so that the others would send far ahead of it.
struct Chain : torch::nn::Module {
  Chain() {
    for (int i = 0; i < size(); ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
      set_partition(*layers.back(), i);
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return opaque(
        [](at::Tensor t) {
          const at::Tensor work = torch::ones({kSlowWidth, kSlowWidth});
          for (int i = 0; i < 10; ++i) work.mm(work);
          return t * 1;
        },
        x);
  }
  std::vector<torch::nn::Linear> layers;
};

// Between two stages, in one direction: the depth of the warm-up on the earlier of them, and two.
void expect_few(const runtime::BufferStatistics& statistics) {
  int num_channels = 0;
  for (int stage = 0; stage + 1 < pp_size(); ++stage) {
    const int64_t warm_up_depth = pp_size() - stage;
    for (const bool is_activation : {true, false}) {
      const int source = is_activation ? stage : stage + 1, target = is_activation ? stage + 1 : stage;
      const auto most = statistics.most.find(runtime::channel_of(source, target, is_activation));
      if (most == statistics.most.end()) continue;
      ++num_channels;
      EXPECT_LE(most->second, warm_up_depth + 2) << "rank " << rank() << ", " << source << " to " << target;
    }
  }
  const bool is_at_an_end = pp_rank() == 0 || pp_rank() == pp_size() - 1;
  EXPECT_EQ(num_channels, is_at_an_end ? 2 : 4);
}

class MessageBuffers : public testing::TestWithParam<int> {};

TEST_P(MessageBuffers, AreAtMostTheWarmUpDepthAndTwoAndNoneIsMadeInSteps) {
  on_ranks(GetParam(), [] {
    DistributedModel model(std::make_shared<Chain>());
    auto train = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    auto evaluate = smp::step([&](at::Tensor data) { return model(data).mean(); });
    const auto data = torch::ones({kMicrobatches * kRows, kWidth});
    const auto statistics = [] { return engine::context("test").buffers.statistics(); };
    int64_t taken = 0;
    for (int s = 0; s < 4; ++s) {
      train(data);
      model.zero_grad();
      const at::NoGradGuard no_grad;
      evaluate(data);
      const int64_t in_step = statistics().taken - std::exchange(taken, statistics().taken);
      EXPECT_GE(in_step, 3 * kMicrobatches) << "rank " << rank();
      EXPECT_EQ(statistics().made, 0) << "rank " << rank() << ", step " << s;
    }
    expect_few(statistics());
  });
}

std::vector<int> worlds() {
  if (std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr) return {kUnderMpirun};
  return {2, 3, 4};
}

INSTANTIATE_TEST_SUITE_P(Worlds, MessageBuffers, testing::ValuesIn(worlds()), [](const auto& test) {
  return test.param == kUnderMpirun ? "Mpi" : "Loopback" + std::to_string(test.param);
});

}  // namespace
}  // namespace smp
