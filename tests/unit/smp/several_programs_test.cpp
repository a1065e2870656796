// Microbatches of one step that run different programs, on different stages, against the same loop without smp: the
// same bits.
#include <array>

#include "smp/engine/context/context.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyRun;
using tests::expect_as_in_a_loop;
using tests::Loop;
using tests::make_filled;
using tests::rows;
using tests::run_smp_ranks;
using torch::nn::Linear;

constexpr int kNumMicrobatches = 6;

/// Layers of one width that a call takes in any order, some of them or all.
struct Layers : torch::nn::Module {
  at::Tensor forward(at::Tensor x) {
    for (int i : order) x = torch::tanh(layers[static_cast<size_t>(i)](x));
    return x;
  }
  std::vector<Linear> layers = {register_module("first", Linear(8, 8)), register_module("second", Linear(8, 8)),
                                register_module("third", Linear(8, 8)), register_module("fourth", Linear(8, 8))};
  std::vector<int> order = {0, 1, 2, 3};
};

using Orders = std::vector<std::vector<int>>;  // by microbatch

at::Tensor train_in_order(const BodyRun<Layers>& run, const std::vector<int>& order) {
  run.net.order = order;
  return tests::train_once(run);
}

class SeveralPrograms : public testing::TestWithParam<std::tuple<int, Pipeline>> {
 protected:
  static Config config() { return {.microbatches = kNumMicrobatches, .pipeline = std::get<Pipeline>(GetParam())}; }

  /// Three steps; each begins with the order after those of the step before. `pins`: ranks of the layers, empty for a free
  /// plan.
  static void expect_same_bits(const Orders& orders, const std::vector<int>& pins = {}) {
    const auto make = [&] {
      const auto net = make_filled<Layers>();
      for (size_t i = 0; i < pins.size(); ++i) set_partition(*net->layers[i], pins[i] % pp_size());
      return net;
    };
    expect_as_in_a_loop<Layers>({.ranks = std::get<int>(GetParam()), .steps = 3, .config = config(), .make = make},
                                [&](const BodyRun<Layers>& run) {
                                  const auto call = static_cast<size_t>(run.step * kNumMicrobatches + run.microbatch);
                                  return train_in_order(run, orders[call % orders.size()]);
                                });
  }
};

TEST_P(SeveralPrograms, TakeAShorterWayOnSomeMicrobatches) { expect_same_bits({{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 3}}); }

TEST_P(SeveralPrograms, TakeLayersOfOtherRanksOnSomeMicrobatches) {
  expect_same_bits({{0, 1, 2, 3}, {2}, {0, 1}, {1, 3}}, {0, 1, 2, 3});
}

TEST_P(SeveralPrograms, VisitALayerEarlierOnSomeMicrobatches) {
  expect_same_bits({{0, 1, 2, 3}, {2, 1, 0, 3}, {0, 1, 2, 3}, {3, 0, 2, 1}, {2, 1, 0, 3}}, {0, 1, 0, 1});
}

TEST_P(SeveralPrograms, VisitALayerOnceOrTwice) {
  expect_same_bits({{0, 1, 2, 3}, {0, 1, 0, 1, 2, 3}, {3, 2, 1}}, {0, 1, 2, 3});
}

// More sequences of programs than tables are kept for.
TEST_P(SeveralPrograms, TakeOneOfTwoPathsEachInManySequences) {
  constexpr std::array kSequences = {0U, 63U, 1U, 2U, 4U, 8U, 16U, 32U, 3U, 5U, 9U, 17U, 33U, 6U, 10U, 18U, 34U, 0U, 1U};
  Loop<Layers> loop{.ranks = std::get<int>(GetParam()), .steps = kSequences.size(), .config = config()};
  loop.config.max_cached_graphs = 2;
  expect_as_in_a_loop<Layers>(loop, [&](const BodyRun<Layers>& run) {
    const bool takes_all = kSequences[static_cast<size_t>(run.step)] >> run.microbatch & 1U;
    return train_in_order(run, takes_all ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0, 3});
  });
}

TEST(Programs, ThatAreForgottenTakeTheirMessageBuffersAlong) {
  run_smp_ranks(2, {.microbatches = kNumMicrobatches, .max_cached_graphs = 2}, [] {
    DistributedModel model(make_filled<Layers>());
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    int64_t first = 0;
    for (int s = 0; s < 20; ++s) {
      step(torch::ones({kNumMicrobatches * (400 + 20 * s), 8}));
      if (s == 4) first = engine::context("test").buffers.free_bytes();
    }
    EXPECT_GT(first, 0);
    EXPECT_LT(engine::context("test").buffers.free_bytes(), 2 * first);
  });
}

TEST(Programs, KeepNothingOfStepFunctionsThatAreGone) {
  run_smp_ranks(1, {.microbatches = 2, .max_cached_graphs = 1}, [] {
    const auto net = make_filled<Layers>();
    DistributedModel model(net);
    net->order = {0, 1};
    const at::Tensor table = torch::ones({2, 8});
    for (int epoch = 0; epoch < 2; ++epoch) {
      auto step = smp::step([&](at::Tensor data) { model.backward((model(data) * table).mean()); });
      auto same_step = step;
      step(rows(4, 8, 1)), same_step(rows(4, 8, 2));
    }
    net->order = {2, 3};
    auto other = smp::step([&](at::Tensor data) { model.backward(model(data).mean()); });
    other(rows(4, 8, 3)), other(rows(4, 8, 4));
    EXPECT_EQ(table.use_count(), 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SeveralPrograms,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(Pipeline::kSimple, Pipeline::kInterleaved)),
                         [](const auto& param) {
                           return std::to_string(std::get<0>(param.param)) +
                                  (std::get<1>(param.param) == Pipeline::kSimple ? "simple" : "interleaved");
                         });

// The embedding's weight is read again by the last operator.
struct TiedNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor hidden = embedding(tokens);
    for (Linear& layer : layers) hidden = torch::tanh(layer(hidden));
    return torch::linear(hidden, embedding->weight);
  }
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(512, 256));
  std::vector<Linear> layers = [this] {
    std::vector<Linear> made;
    for (int i = 0; i < 6; ++i) made.push_back(register_module("layer" + std::to_string(i), Linear(256, 256)));
    return made;
  }();
};

// On one rank, in two visits of it, or relayed: the gradient is that of one process, to the bit.
TEST(TiedWeights, TrainExactly) {
  Loop<TiedNet> loop{.steps = 2, .config = {.microbatches = 4}};
  loop.batch = [](int step) { return torch::randint(512, {256}, tests::generator(static_cast<uint64_t>(step)), at::kLong); };
  for (const int ranks : {2, 3}) {
    loop.ranks = ranks;
    expect_as_in_a_loop<TiedNet>(loop, tests::train_once);
  }
}

// What the first batch placed in another order than the program's: a counter that is made before the model is called.
TEST(OtherBatches, FollowAPlacementFromAnotherOrder) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    DistributedModel model(tests::make_net());
    const auto counted = [&](const at::Tensor& data) {
      at::Tensor correct = torch::zeros({}, torch::kLong);
      const at::Tensor output = model(data);
      correct += (output.argmax(1) == 0).sum();
      return std::make_tuple(output, correct);
    };
    auto step = smp::step([&](at::Tensor data) {
      const auto [output, correct] = counted(data);
      model.backward(output.square().mean());
      return correct;
    });
    auto evaluate = smp::step([&](at::Tensor data) {
      const torch::NoGradGuard no_grad;
      return std::get<1>(counted(data));
    });
    for (const int64_t size : {8, 8, 4}) EXPECT_EQ(step(rows(size, 8, 1)).size(), 2);
    EXPECT_EQ(evaluate(rows(8, 8, 1)).size(), 2);
  });
}

}  // namespace
}  // namespace smp
