// Opaque regions: custom autograd functions and raw loops in a split model, against the same code without smp.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::expect_as_in_a_loop;
using tests::make_filled;
using tests::rows;
using tests::run_smp_ranks;
using tests::train_once;

struct RoundStraightThrough : torch::autograd::Function<RoundStraightThrough> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.round(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list grads) {
    return {grads[0] * 2};
  }
};

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The forms that libraries give a gradient reversal.
enum OpaqueForm { kViewOf, kItself, kWritten };

template <OpaqueForm kForm>
struct OpaqueReversed : torch::autograd::Function<OpaqueReversed<kForm>> {
  static at::Tensor forward(AutogradContext* context, at::Tensor x, double factor) {
    context->saved_data["factor"] = factor;
    if (kForm == kItself) return x;
    if (kForm == kViewOf) return x.view_as(x);
    context->mark_dirty({x.mul_(1)});
    return x;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] * -context->saved_data["factor"].toDouble(), at::Tensor()};
  }
};

template <OpaqueForm kForm>
struct ReversingNet : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::relu(first(x));
    const at::Tensor reversed =
        opaque([](at::Tensor t) { return OpaqueReversed<kForm>::apply(kForm == kWritten ? t.clone() : t, 0.5); }, hidden);
    return third(hidden) + fourth(torch::tanh(second(reversed)));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
  torch::nn::Linear third = register_module("third", torch::nn::Linear(8, 4));
  torch::nn::Linear fourth = register_module("fourth", torch::nn::Linear(8, 4));
};

/// The same module as its author wrote it, without smp.
template <OpaqueForm kForm>
struct PlainReversingNet : ReversingNet<kForm> {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor hidden = torch::relu(this->first(x));
    const at::Tensor reversed = OpaqueReversed<kForm>::apply(kForm == kWritten ? hidden.clone() : hidden, 0.5);
    return this->third(hidden) + this->fourth(torch::tanh(this->second(reversed)));
  }
};

struct OpaqueNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = first(x);
    const at::Tensor rounded = opaque([](at::Tensor t) { return RoundStraightThrough::apply(t * 4) / 4; }, hidden);
    const auto [low, high] =
        opaque([](at::Tensor a, at::Tensor weight) { return std::make_tuple(a.matmul(weight).min(), a.max()); }, rounded,
               second->weight);
    return third(torch::relu(second(rounded))) + low * high;
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
  torch::nn::Linear third = register_module("third", torch::nn::Linear(8, 4));
};

class Opaque : public testing::TestWithParam<int> {};

TEST_P(Opaque, RegionsTrainBitForBit) {
  // One weight has two readers.
  expect_as_in_a_loop<OpaqueNet>({.ranks = GetParam(), .steps = 3, .config = {.microbatches = 2}}, train_once);
}

template <OpaqueForm kForm>
void expect_reversal_trains(int ranks) {
  using Net = ReversingNet<kForm>;
  tests::Loop<Net> loop{.ranks = ranks, .steps = 5, .make_twin = make_filled<PlainReversingNet<kForm>>};
  for (const StageKind stage : {StageKind::kTape, StageKind::kAutograd}) {  // tapes run from the third step on
    loop.config.stage = stage;
    expect_as_in_a_loop<Net>(loop, train_once);
  }
}

TEST_P(Opaque, GradientReversalTrainsBitForBit) {
  expect_reversal_trains<kViewOf>(GetParam());
  expect_reversal_trains<kItself>(GetParam());
  expect_reversal_trains<kWritten>(GetParam());
}

TEST_P(Opaque, RegionsMayReadDataAndReturnLists) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = tests::make_net();
    DistributedModel model(net);
    const auto sorted_of = [](const at::Tensor& output) {
      return opaque(
          [](at::Tensor t) {
            at::Tensor sorted = t.detach().clone().flatten();
            std::sort(sorted.data_ptr<float>(), sorted.data_ptr<float>() + sorted.numel());
            return std::vector<at::Tensor>{sorted, t.sum()};
          },
          output);
    };
    auto step = smp::step([&](at::Tensor data) { return sorted_of(model(data)); });
    const at::NoGradGuard no_grad;
    const at::Tensor data = rows(4, 8, 1);
    const auto got = step(data);
    for (int64_t m = 0; m < 2; ++m) {
      const auto want = sorted_of(tests::make_net()->forward(data.chunk(2)[static_cast<size_t>(m)].clone()));
      expect_bit_equal(got[0][m], want[0], "sorted");
      expect_bit_equal(got[1][m], want[1], "sum");
    }
  });
}

TEST_P(Opaque, RegionsDrawTheNumbersOfTheirMicrobatch) {
  std::vector<at::Tensor> of_one, of_all;
  const auto losses = [](int ranks, std::vector<at::Tensor>& all) {
    std::mutex mutex;
    run_smp_ranks(ranks, {.microbatches = 2}, [&] {
      DistributedModel model(tests::make_net());
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor loss = opaque([](at::Tensor t) { return (t * torch::rand_like(t)).sum(); }, model(data));
        model.backward(loss);
        return loss;
      });
      const StepOutput output = step(rows(4, 8, 1));
      const std::lock_guard lock(mutex);
      all = output.outputs();
    });
  };
  losses(1, of_one);
  losses(GetParam(), of_all);
  expect_bit_equal(of_all, of_one, "losses");
  EXPECT_FALSE(torch::equal(of_one[0], of_one[1]));
}

TEST(OpaqueRecorded, LeavesTheUsersGeneratorAlone) {
  run_smp_ranks(1, {.microbatches = 2}, [] {
    DistributedModel model(make_filled<OpaqueNet>());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = opaque([](at::Tensor x) { return torch::dropout(x, 0.5, true); }, model(data)).mean();
      model.backward(loss);
      return loss;
    });
    torch::manual_seed(5);
    const at::Tensor want = torch::rand({3});
    torch::manual_seed(5);
    step(rows(4, 8, 1));
    expect_bit_equal(torch::rand({3}), want, "the user's numbers");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Opaque, testing::Values(1, 2, 3));

TEST(OpaqueResults, ShareNoMemoryWithInputsOrWithEachOther) {
  const at::Tensor x = torch::ones({2}, torch::requires_grad()) * 1;
  const auto [same, view, other] = opaque([](at::Tensor t) { return std::make_tuple(t, t.view({2, 1}), t.detach()); }, x);
  for (const at::Tensor& result : {same, view, other}) EXPECT_FALSE(result.is_alias_of(x));
  const auto [whole, part] = opaque(
      [](at::Tensor t) {
        const at::Tensor y = t * 2;
        return std::make_tuple(y, y[0]);
      },
      x);
  EXPECT_FALSE(part.is_alias_of(whole));
  expect_bit_equal(torch::autograd::grad({part}, {x})[0], torch::tensor({2.0F, 0.0F}), "gradient");
}

TEST(OpaqueRefused, WhenTheFunctionWritesToItsInputOrReturnsNothing) {
  const at::Tensor x = torch::ones({2});
  EXPECT_TRUE(contains(message_of([&] { opaque([](at::Tensor t) { return t.add_(1) * 2; }, x); }), "writes to input 0"));
  EXPECT_TRUE(contains(message_of([&] { opaque([](at::Tensor) { return at::Tensor(); }, x); }), "an undefined one"));
}

TEST(OpaqueRefused, AnotherNumberOfResultsThanOnZeros) {
  for (const float value : {-1.0F, 1.0F}) {
    run_smp_ranks(1, {}, [&] {
      DistributedModel model(tests::make_net());
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor shifted = model(data).mul(0).add(value);
        const auto parts = opaque(
            [](at::Tensor t) {
              const auto count = static_cast<size_t>(2 + t.flatten()[0].item<float>());
              return std::vector<at::Tensor>(count, t);
            },
            shifted);
        return parts[0] + parts[1];
      });
      const at::NoGradGuard no_grad;
      const std::string text = message_of([&] { step(rows(4, 8, 1)); });
      EXPECT_TRUE(contains(text, "expected 2 results as recorded without data, got " + std::to_string(2 + int(value))))
          << text;
    });
  }
}

struct PositiveNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor lengths = x.abs().sum(1).round() + 1;
    return last(opaque(
        [](at::Tensor h, at::Tensor by) {
          TORCH_CHECK(by.min().item<float>() > 0, "lengths must be positive");
          return h / by.unsqueeze(1);
        },
        torch::relu(first(x)), lengths));
  }
};

/// Gradients of its own, which train the weight.
struct PenaltyNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::relu(first(x))) +
           opaque(
               [](at::Tensor data, at::Tensor weight) {
                 data = data.detach().requires_grad_();
                 const at::Tensor score = torch::tanh(torch::linear(data, weight)).sum();
                 return torch::autograd::grad({score}, {data}, {}, true, true)[0].square().mean();
               },
               x, first->weight);
  }
};

TEST_P(Opaque, ARegionThatThrowsOnZerosIsRecordedOnValuesOfArguments) {
  expect_as_in_a_loop<PositiveNet>({.ranks = GetParam(), .config = {.microbatches = 4}}, train_once);
}

TEST_P(Opaque, ARegionHasGradientsOfItsOwn) {
  expect_as_in_a_loop<PenaltyNet>({.ranks = GetParam(), .config = {.microbatches = 1}}, train_once);
}

TEST(OpaqueRefused, SaysThatItWasCalledOnZeros) {
  run_smp_ranks(1, {}, [] {
    DistributedModel model(tests::make_net());
    bool throws_own = false;
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor output = model(data);
      if (throws_own) {
        return opaque([](at::Tensor t) { return t.any().item<bool>() ? t : throw std::domain_error("all are zero"); },
                      output);
      }
      return opaque(
          [](at::Tensor t) {
            TORCH_CHECK(t.any().item<bool>(), "all are zero");
            return t * 2;
          },
          output);
    });
    const at::NoGradGuard no_grad;
    for (const bool own : {false, true}) {
      throws_own = own;
      const std::string text = message_of([&] { step(rows(4, 8, 1)); });
      EXPECT_TRUE(contains(text, "all are zero") && contains(text, "calls its function on zeros")) << text;
      EXPECT_TRUE(contains(text, "lengths.clamp_min(1)")) << text;
    }
  });
}

TEST(OpaqueRefused, WhatAddsToTheGradientsOfItsInputs) {
  const at::Tensor weight = torch::ones({2}, torch::requires_grad());
  for (int round = 0; round < 2; ++round) {  // there is none yet, and there is one
    const auto add = [](at::Tensor w) { return (w * 2).sum().backward(), w * 2; };
    EXPECT_TRUE(contains(message_of([&] { opaque(add, weight); }), "leaves the gradients of its inputs")) << round;
  }
}

TEST(OpaqueRefused, AHookBeforeTheRegionInTheFirstStep) {
  run_smp_ranks(1, {}, [] {
    DistributedModel model(tests::make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor hidden = model(data);
      hidden.register_hook([](at::Tensor gradient) { return gradient * 2; });
      const at::Tensor loss = opaque([](at::Tensor t) { return t.sum(); }, hidden);
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < 2; ++s) EXPECT_TRUE(contains(message_of([&] { step(rows(4, 8, 1)); }), "hooks on parameters only"));
  });
}

}  // namespace
}  // namespace smp
