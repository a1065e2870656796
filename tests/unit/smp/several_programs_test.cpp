// Microbatches of one step that run different programs, on different stages, against the same loop without smp: the
// same bits.
#include <gtest/gtest.h>

#include <functional>

#include "smp/engine/context/context.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using tests::expect_twins;
using tests::rows;
using tests::run_smp_ranks;
using torch::nn::Linear;

constexpr int kNumMicrobatches = 6;

/// Layers of one width that a call takes in any order, some of them or all.
struct Layers : torch::nn::Module {
  at::Tensor forward(at::Tensor x, const std::vector<int>& order) {
    for (int i : order) x = torch::tanh(layers[static_cast<size_t>(i)](x));
    return x;
  }
  std::vector<Linear> layers = {register_module("first", Linear(8, 8)), register_module("second", Linear(8, 8)),
                                register_module("third", Linear(8, 8)), register_module("fourth", Linear(8, 8))};
};

using Orders = std::vector<std::vector<int>>;  // by microbatch

std::shared_ptr<Layers> make_layers() {
  auto net = std::make_shared<Layers>();
  tests::fill(*net);
  return net;
}

class SeveralPrograms : public testing::TestWithParam<std::tuple<int, Pipeline>> {
 protected:
  /// Three steps whose gradients add up; step s begins with the order after those of step s - 1. `pins`: ranks of the
  /// layers, empty for a free plan.
  static void expect_same_bits(const Orders& orders, const std::vector<int>& pins = {}) {
    const auto [ranks, pipeline] = GetParam();
    run_smp_ranks(ranks, {.microbatches = kNumMicrobatches, .pipeline = pipeline}, [&] {
      const auto net = make_layers(), twin = make_layers();
      for (size_t i = 0; i < pins.size(); ++i) set_partition(*net->layers[i], pins[i] % pp_size());
      DistributedModel<Layers> model(net);
      size_t calls = 0;
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor loss = model(data, orders[calls++ % orders.size()]).square().mean();
        model.backward(loss);
        return loss;
      });
      for (size_t s = 0; s < 3; ++s) {
        const at::Tensor data = rows(2 * kNumMicrobatches, 8, 10 + s);
        std::vector<at::Tensor> want;
        for (const auto& part : support::split_batch({data}, kNumMicrobatches)) {
          const std::vector<int>& order = orders[(s * kNumMicrobatches + want.size()) % orders.size()];
          const at::Tensor loss = twin->forward(part[0], order).square().mean();
          loss.div(kNumMicrobatches).backward();
          want.push_back(loss.detach());
        }
        const std::string what = "step " + std::to_string(s);
        expect_bit_equal(step(data).outputs(), want, what);
        expect_twins(model, *twin, what);
      }
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
  const auto [ranks, pipeline] = GetParam();
  run_smp_ranks(ranks, {.microbatches = kNumMicrobatches, .pipeline = pipeline, .max_cached_graphs = 2}, [] {
    const auto net = make_layers(), twin = make_layers();
    DistributedModel<Layers> model(net);
    unsigned bits = 0;
    int call = 0;
    const auto order = [&] { return bits >> call++ & 1U ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0, 3}; };
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data, order()).square().mean();
      model.backward(loss);
      return loss;
    });
    const at::Tensor data = rows(2 * kNumMicrobatches, 8, 1);
    for (const unsigned sequence : {0U, 63U, 1U, 2U, 4U, 8U, 16U, 32U, 3U, 5U, 9U, 17U, 33U, 6U, 10U, 18U, 34U, 0U, 1U}) {
      bits = sequence, call = 0;
      const StepOutput got = step(data);
      call = 0;
      for (const auto& part : support::split_batch({data}, kNumMicrobatches)) {
        const int64_t m = call;
        const at::Tensor want = twin->forward(part[0], order()).square().mean();
        expect_bit_equal(got[m], want.detach(), "sequence " + std::to_string(sequence));
      }
    }
  });
}

TEST(Programs, ThatAreForgottenTakeTheirMessageBuffersAlong) {
  run_smp_ranks(2, {.microbatches = kNumMicrobatches, .max_cached_graphs = 2}, [] {
    DistributedModel<Layers> model(make_layers());
    const std::vector<int> all = {0, 1, 2, 3};
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data, all).square().mean()); });
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
    DistributedModel<Layers> model(make_layers());
    const std::vector<int> lower = {0, 1}, upper = {2, 3};
    const at::Tensor table = torch::ones({2, 8});
    for (int epoch = 0; epoch < 2; ++epoch) {
      auto step = smp::step([&](at::Tensor data) { model.backward((model(data, lower) * table).mean()); });
      auto same_step = step;
      step(rows(4, 8, 1)), same_step(rows(4, 8, 2));
    }
    auto other = smp::step([&](at::Tensor data) { model.backward(model(data, upper).mean()); });
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
TEST(TiedWeights, TrainExactlyWhereAskedFor) {
  for (const int ranks : {2, 3})
    run_smp_ranks(ranks, {.microbatches = 4, .exact_tied_weights = true}, [] {
      const auto net = std::make_shared<TiedNet>(), twin = std::make_shared<TiedNet>();
      tests::fill(*net), tests::fill(*twin);
      DistributedModel model(net);
      auto step = smp::step([&](at::Tensor tokens) {
        const at::Tensor loss = model(tokens).square().mean();
        model.backward(loss);
        return loss;
      });
      for (int s = 0; s < 2; ++s) {
        const at::Tensor tokens = torch::randint(512, {256}, tests::generator(static_cast<uint64_t>(s)), at::kLong);
        const StepOutput losses = step(tokens);
        for (int64_t m = 0; m < 4; ++m) {
          const at::Tensor want = twin->forward(tokens.chunk(4)[m]).square().mean();
          (want / 4).backward();
          expect_bit_equal(losses[m], want.detach(), "loss");
        }
        expect_twins(model, *twin, "step " + std::to_string(s));
      }
    });
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
