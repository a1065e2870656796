// Predicted memory against what the CPU allocator hands out: whole ranks, and optimizers.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>

#include "examples/common/tensor_memory.h"
#include "examples/transformer_lm/model.h"
#include "smp/engine/rank/rank_state.h"
#include "tests/support/long_form.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using examples::TensorMemory;
using tests::rows;
using tests::run_smp_ranks;

// Four layers of 256 KiB.
struct WideNet : torch::nn::Module {
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = torch::relu(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers = register_module("layers", [] {
    torch::nn::ModuleList list;
    for (int i = 0; i < 4; ++i) list->push_back(torch::nn::Linear(256, 256));
    return list;
  }());
};

const partitioner::StageCost& own_cost() {
  const auto& plan = engine::rank_state("test").models.all().front()->first_program->plan;
  return plan.stages.at(static_cast<size_t>(pp_rank())).cost;
}

class Ranks : public testing::TestWithParam<int> {};

TEST_P(Ranks, HoldNoDataOfOtherStagesParametersAfterTheFirstStep) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const TensorMemory memory;
    const auto net = std::make_shared<WideNet>();
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    step(rows(4, 256, 1));
    model.zero_grad();
    int64_t held = 0, all = 0;
    for (const at::Tensor& parameter : net->parameters()) {
      auto* storage = parameter.storage().unsafeGetStorageImpl();
      all += static_cast<int64_t>(storage->nbytes());
      if (storage->_mutable_data_ptr_no_checks().get() != nullptr) held += static_cast<int64_t>(storage->nbytes());
    }
    EXPECT_EQ(held, own_cost().parameter_bytes);
    EXPECT_EQ(held == all, pp_size() == 1);
    // The memory is really free again: the rest are message buffers, of a few rows each.
    EXPECT_GE(memory.current_bytes(), held);
    EXPECT_LE(memory.current_bytes(), held + (int64_t{1} << 17));
  });
}

INSTANTIATE_TEST_SUITE_P(OneToFour, Ranks, testing::Values(1, 2, 3, 4));

struct Layout {
  int ranks;
  int64_t microbatches;
  Pipeline pipeline;
};

class TransformerPeak : public testing::TestWithParam<Layout> {};

class Autocast {
 public:
  explicit Autocast(bool is_on) { at::autocast::set_autocast_enabled(at::kCPU, is_on); }
  ~Autocast() { at::autocast::set_autocast_enabled(at::kCPU, false); }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

struct Use {
  StageKind stage = StageKind::kTape;
  bool autocast = false;         // to bfloat16
  std::string planned_device{};  // of which allocations are multiples of `unit`
  int64_t unit = 1;
  double least = 1, most = 1.2;  // predicted, of measured
};

void expect_peak(const Layout& layout, const Use& use) {
  const Config config{.microbatches = layout.microbatches,
                      .pipeline = layout.pipeline,
                      .stage = use.stage,
                      .planned_device = use.planned_device};
  run_smp_ranks(layout.ranks, config, [&use] {
    TensorMemory memory(use.unit);
    const auto net = std::make_shared<transformer_lm::TransformerLm>(
        transformer_lm::ModelOptions{.vocab = 500, .width = 64, .heads = 4, .hidden = 256, .layers = 4, .max_tokens = 32});
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::Adam(net->parameters(), 1e-3), model);
    auto step = smp::step([&](at::Tensor tokens, at::Tensor target) {
      at::Tensor loss;
      {
        const Autocast autocast(use.autocast);
        const at::Tensor logits = model(tokens);
        loss = torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(2)}), target.reshape(-1));
      }
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < 4; ++s) {  // records in the second and compares in that or the next
      const at::Tensor tokens = torch::full({8, 32}, s + 1, torch::kLong);
      optimizer.zero_grad();
      step(tokens, tokens);
      optimizer.step();
      if (s == 0) memory.forget_peak();  // it began with the whole model on every rank
    }
    const auto measured = static_cast<double>(memory.peak_bytes());
    const auto predicted = static_cast<double>(model.predicted_peak_bytes().at(static_cast<size_t>(pp_rank())));
    const char* kind = use.stage == StageKind::kTape ? "tape" : "autograd";
    EXPECT_GE(predicted, use.least * measured) << kind << ", rank " << rank();
    EXPECT_LE(predicted, use.most * measured) << kind << ", rank " << rank();
  });
}

/// The short form has each layout with one kind of stages, and under autocast with the other.
void expect_peaks(const Layout& layout, Use use) {
  const bool is_tape = (layout.ranks % 2 == 0) == (layout.pipeline == Pipeline::kInterleaved);
  for (const StageKind stage : {StageKind::kAutograd, StageKind::kTape}) {
    if (!support::is_long() && (stage == StageKind::kTape) != (is_tape != use.autocast)) continue;
    use.stage = stage;
    expect_peak(layout, use);
  }
}

TEST_P(TransformerPeak, IsPredictedWithinAFifthAndNeverBelow) { expect_peaks(GetParam(), {}); }

// What a backward holds for a moment of two precisions at once is not all known.
TEST_P(TransformerPeak, IsPredictedUnderAutocastWithinATwentiethBelow) {
  expect_peaks(GetParam(), {.autocast = true, .least = 0.95});
}

TEST_P(TransformerPeak, CountsAllocationsAsThePlannedDeviceMakesThem) {
  expect_peak(GetParam(), {.planned_device = "H100", .unit = 512});
}

INSTANTIATE_TEST_SUITE_P(Layouts, TransformerPeak,
                         testing::Values(Layout{1, 1, Pipeline::kInterleaved}, Layout{1, 4, Pipeline::kInterleaved},
                                         Layout{1, 4, Pipeline::kSimple}, Layout{2, 1, Pipeline::kInterleaved},
                                         Layout{2, 2, Pipeline::kSimple}, Layout{2, 8, Pipeline::kInterleaved},
                                         Layout{2, 8, Pipeline::kSimple}, Layout{3, 4, Pipeline::kInterleaved},
                                         Layout{3, 8, Pipeline::kSimple}, Layout{4, 8, Pipeline::kInterleaved},
                                         Layout{4, 8, Pipeline::kSimple}));

// What an optimizer takes beyond parameters and gradients, measured, on one and on two ranks.
template <class Optimizer, class Options>
void expect_memory(const std::string& what, const Options& options, double state, double workspace) {
  for (const int ranks : {1, 2}) {
    run_smp_ranks(ranks, {}, [&] {
      TensorMemory memory;
      const auto net = std::make_shared<WideNet>();
      DistributedModel model(net);
      const int64_t without_optimizer = memory.current_bytes();
      DistributedOptimizer optimizer(Optimizer(net->parameters(), options), model);
      const int64_t at_construction = memory.current_bytes() - without_optimizer;
      auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
      step(rows(4, 256, 1));
      const int64_t before = memory.current_bytes();
      optimizer.step();
      const partitioner::StageCost& cost = own_cost();
      const int64_t measured = at_construction + memory.current_bytes() - before;
      EXPECT_EQ(cost.optimizer_bytes, static_cast<int64_t>(state * static_cast<double>(cost.parameter_bytes))) << what;
      EXPECT_EQ(measured, cost.optimizer_bytes) << what;
      memory.forget_peak();
      const int64_t steady = memory.current_bytes();
      optimizer.step();
      constexpr double kLargest = 4 * 256 * 256;  // bytes
      constexpr double kScalars = 64;             // numbers that become tensors on their way
      EXPECT_NEAR(static_cast<double>(memory.peak_bytes() - steady), workspace * kLargest, kScalars) << what;
    });
  }
}

TEST(OptimizerMemory, PlanCountsWhatTheOptimizersReallyHold) {
  using namespace torch::optim;
  expect_memory<SGD>("SGD", SGDOptions(0.1), 0, 0);
  expect_memory<SGD>("SGD with decay", SGDOptions(0.1).weight_decay(0.1), 0, 1);
  expect_memory<SGD>("momentum", SGDOptions(0.1).momentum(0.9), 1, 0);
  expect_memory<SGD>("Nesterov", SGDOptions(0.1).momentum(0.9).nesterov(true), 1, 1);
  expect_memory<Adam>("Adam", AdamOptions(0.1), 2, 2);
  expect_memory<Adam>("Adam with decay", AdamOptions(0.1).weight_decay(0.1), 2, 3);
  expect_memory<Adam>("AMSGrad", AdamOptions(0.1).amsgrad(true), 3, 2);
  expect_memory<AdamW>("AdamW", AdamWOptions(0.1), 2, 2);
  expect_memory<AdamW>("AdamW, AMSGrad", AdamWOptions(0.1).amsgrad(true), 3, 2);
  expect_memory<Adagrad>("Adagrad", AdagradOptions(0.1), 1, 1);
  expect_memory<RMSprop>("RMSprop", RMSpropOptions(0.1), 1, 1);
  expect_memory<RMSprop>("RMSprop, centered", RMSpropOptions(0.1).centered(true), 2, 1);
  expect_memory<RMSprop>("RMSprop, all", RMSpropOptions(0.1).centered(true).momentum(0.9), 3, 1);
}

TEST(OptimizerMemory, LimitRefusesWithAdamWhatItAllowsWithSgd) {
  // Parameters and gradients take 2 MiB, Adam's state 2 more.
  const Config config{.microbatches = 2, .memory_limit_mb = 3};
  const auto first_step = [](auto make) {
    const auto net = std::make_shared<WideNet>();
    DistributedModel model(net);
    auto optimizer = DistributedOptimizer(make(*net), model);
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    step(rows(4, 256, 1));
  };
  run_smp_ranks(1, config, [&] {
    EXPECT_NO_THROW(first_step([](WideNet& net) { return torch::optim::SGD(net.parameters(), 0.1); }));
    EXPECT_THROW(first_step([](WideNet& net) { return torch::optim::Adam(net.parameters(), 0.1); }), c10::ValueError);
  });
}

}  // namespace
}  // namespace smp
