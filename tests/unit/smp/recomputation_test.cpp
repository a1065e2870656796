// Activation checkpointing: the bits of the unsplit model, less memory, and a prediction of that.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <mutex>
#include <string>

#include "examples/common/tensor_memory.h"
#include "examples/transformer_lm/model.h"
#include "smp/smp.h"
#include "tests/support/model_zoo.h"
#include "tests/support/oracle.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

using support::PipelineRun;
using support::ZooModel;

// Of modules within one another the outer one counts.
void checkpoint_children(torch::nn::Module& module) {
  for (const auto& child : module.children()) {
    if (!child->parameters().empty()) set_activation_checkpointing(*child);
  }
}

class Recomputation : public testing::TestWithParam<ZooModel> {};

TEST_P(Recomputation, LeavesEveryBit) {
  const ZooModel& model = GetParam();
  at::set_num_threads(1);
  const support::SplitOptions options{.place = checkpoint_children, .steps = support::kStepsToTape};
  const auto want = support::run_unsplit(model, 4, options);
  for (const int ranks : {1, 2, 3}) {
    const StageKind stage = ranks == 2 ? StageKind::kAutograd : StageKind::kTape;
    const Config config{.microbatches = 4, .stage = stage, .log_level = LogLevel::kOff};
    const PipelineRun run = support::run_on_pipeline(model, ranks, config, options);
    support::expect_same_step(run.result, want, std::to_string(ranks) + " ranks");
    int64_t num_recomputed = 0;
    for (const auto& report : run.reports) num_recomputed += report.num_recomputed;
    EXPECT_GT(num_recomputed, 0) << ranks << " ranks";
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, Recomputation, testing::ValuesIn(support::model_zoo()),
                         [](const testing::TestParamInfo<ZooModel>& test) { return test.param.name; });

// With replicas and several visits too: what runs without is the reference, as replicas add up in an order of their own.
TEST_P(Recomputation, LeavesEveryBitOfOtherLayouts) {
  const ZooModel& model = GetParam();
  at::set_num_threads(1);
  struct Job {
    int ranks;
    Config config;
  };
  const Job jobs[] = {{4, {.pipeline_parallel_degree = 2, .microbatches = 2}},
                      {2, {.microbatches = 4, .pipeline = Pipeline::kSimple}},
                      {2, {.microbatches = 4, .virtual_stages = 2}}};
  for (const Job& job : jobs) {
    const auto run = [&](const support::SplitOptions& options) {
      support::OracleResult all;
      std::mutex mutex;
      Config config = job.config;
      config.seed = support::kSplitBaseSeed;
      config.log_level = LogLevel::kOff;
      tests::run_smp_ranks(job.ranks, config, [&] {
        support::OracleResult own = support::run_split(model, options);
        const std::lock_guard<std::mutex> lock(mutex);
        own.gradients.insert(all.gradients.begin(), all.gradients.end());  // replicas have the same
        if (rank() == 0) all.losses = own.losses, all.outputs = own.outputs, all.buffers = own.buffers;
        all.gradients = std::move(own.gradients);
      });
      return all;
    };
    const auto kept = run({.steps = support::kStepsToTape});
    const auto again = run({.place = checkpoint_children, .steps = support::kStepsToTape});
    support::expect_same_step(again, kept, model.name + " on " + std::to_string(job.ranks) + " ranks");
  }
}

struct Trained {
  int64_t predicted = 0;
  int64_t first = 0, later = 0;  // peaks of the first step, and of those behind it
  double step_s = 0;             // predicted
  at::Tensor losses{};
};

Trained trained(bool recomputes) {
  examples::TensorMemory memory;
  const auto net = std::make_shared<transformer_lm::TransformerLm>(
      transformer_lm::ModelOptions{.vocab = 100, .width = 64, .heads = 4, .hidden = 256, .layers = 8, .max_tokens = 64});
  {
    const at::NoGradGuard no_grad;
    const at::Generator numbers = at::make_generator<at::CPUGeneratorImpl>(uint64_t{3});  // ranks are threads
    for (at::Tensor& parameter : net->parameters()) parameter.normal_(0, 0.1, numbers);
  }
  if (recomputes) {
    for (const auto& layer : net->named_modules()) {
      const bool is_layer =
          layer.key().starts_with("encoder.") && std::count(layer.key().begin(), layer.key().end(), '.') == 1;
      if (is_layer) set_activation_checkpointing(*layer.value());
    }
  }
  DistributedModel model(net);
  DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 1e-3), model);
  auto step = smp::step([&](at::Tensor tokens, at::Tensor target) {
    const at::Tensor logits = model(tokens);
    const at::Tensor loss = torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(2)}), target.reshape(-1));
    model.backward(loss);
    return loss;
  });
  Trained run;
  std::vector<at::Tensor> losses;
  for (int s = 0; s < 5; ++s) {
    const at::Tensor tokens = torch::full({16, 64}, s + 1, torch::kLong);
    optimizer.zero_grad();
    memory.forget_peak();
    losses.push_back(step(tokens, tokens).stack());
    int64_t& measured = s == 0 ? run.first : run.later;
    measured = std::max(measured, memory.peak_bytes());
    optimizer.step();
  }
  run.losses = torch::stack(losses);
  run.predicted = model.predicted_peak_bytes().at(static_cast<size_t>(pp_rank()));
  run.step_s = model.predicted_step_s();
  return run;
}

TEST(RecomputationMemory, IsLessFromTheFirstStepOnAndPredicted) {
  for (const int ranks : {1, 2}) {
    for (const StageKind stage : {StageKind::kTape, StageKind::kAutograd}) {
      tests::run_smp_ranks(ranks, {.microbatches = 4, .stage = stage, .log_level = LogLevel::kOff}, [&] {
        const Trained kept = trained(false), again = trained(true);
        const std::string where = "rank " + std::to_string(pp_rank()) + " of " + std::to_string(ranks);
        EXPECT_LT(again.first, kept.first * 2 / 3) << where;
        EXPECT_LT(again.later, kept.later * 2 / 3) << where;
        EXPECT_GE(again.predicted, again.later) << where;
        EXPECT_LE(again.predicted, again.later * 11 / 10) << where;
        EXPECT_GE(again.predicted, again.first) << where;
        std::cout << where << ": kept " << kept.predicted << ' ' << kept.first << ' ' << kept.later << ", again "
                  << again.predicted << ' ' << again.first << ' ' << again.later << '\n';
      });
    }
  }
}

// Writes in place to what it reads again: calls that need each other run again together.
struct InPlaceBlock : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = in(x);
    y += up(torch::relu(down(torch::relu(y))));
    return out(torch::gelu(y));
  }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(16, 64));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(64, 16));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(16, 64));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(64, 16));
};

TEST(RecomputationMemory, IsLessWhereARegionWritesToWhatItReads) {
  tests::run_smp_ranks(1, {.microbatches = 2, .log_level = LogLevel::kOff}, [] {
    examples::TensorMemory memory;
    torch::nn::Sequential net;
    for (int i = 0; i < 8; ++i) net->push_back(std::make_shared<InPlaceBlock>());
    checkpoint_children(*net);
    DistributedModel model(net.ptr());
    auto step = smp::step([&](at::Tensor x) {
      const at::Tensor loss = net->forward(x).square().mean();
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < 5; ++s) {
      memory.forget_peak();
      step(torch::ones({2048, 16}));
      EXPECT_LE(memory.peak_bytes(), model.predicted_peak_bytes().at(0)) << "step " << s;
    }
  });
}

TEST(RecomputationMemory, StaysBelowALimitWithTheSameBits) {
  for (const int ranks : {1, 2}) {
    std::vector<Trained> free(static_cast<size_t>(ranks));
    const auto run = [&](const Config& config, const std::function<void(size_t rank)>& body) {
      tests::run_smp_ranks(ranks, config, [&] { body(static_cast<size_t>(pp_rank())); });
    };
    const Config config{.microbatches = 4, .seed = 5, .log_level = LogLevel::kOff};
    run(config, [&](size_t rank) { free[rank] = trained(false); });
    double step_s = free[0].step_s;
    for (const double part : {1.0, 0.7, 0.5, 0.4}) {
      Config limited = config;
      for (const Trained& one : free) {
        limited.rank_memory_limit_mb.push_back(static_cast<double>(one.predicted) * part / (1 << 20));
      }
      std::vector<Trained> within(static_cast<size_t>(ranks));
      run(limited, [&](size_t rank) {
        within[rank] = trained(false);
        const std::string where =
            "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " at " + std::to_string(part);
        const auto limit = static_cast<int64_t>(static_cast<double>(free[rank].predicted) * part);
        EXPECT_LE(within[rank].first, limit) << where;
        EXPECT_LE(within[rank].later, limit) << where;
        EXPECT_LE(within[rank].predicted, limit) << where;
        EXPECT_TRUE(at::equal(within[rank].losses, free[rank].losses)) << where;
        std::cout << where << ": limit " << limit << ", predicted " << within[rank].predicted << ", measured "
                  << within[rank].first << ' ' << within[rank].later << ", step " << within[rank].step_s * 1e3 << " ms\n";
      });
      EXPECT_GE(within[0].step_s, step_s) << "a lower limit makes no step faster";
      step_s = within[0].step_s;
    }
  }
}

}  // namespace
}  // namespace smp
