// Buffers and weights that one microbatch writes to before an earlier one has run its backward: gradients are those of the
// content that its forward saw. Where its own forward has written to what the backward needs, LibTorch refuses, and so do
// we.
#include "tests/support/split_run.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::contains;
using tests::BodyRun;
using tests::expect_as_in_a_loop;
using tests::train_once;

struct TwoNormsNet : tests::NormNet {
  at::Tensor forward(const at::Tensor& x) { return last(second_norm(middle(norm(first(x))))); }
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(8, 8));
  torch::nn::BatchNorm1d second_norm = register_module("second_norm", torch::nn::BatchNorm1d(8));
};

struct CenterNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x));
    {
      const at::NoGradGuard no_grad;
      center.mul_(0.5).add_(hidden.mean(0), 0.5);
    }
    return last(hidden * center.view({1, 8}));
  }
  at::Tensor center = register_buffer("center", torch::ones({8}));
};

class WrittenBuffers : public testing::TestWithParam<int> {};
// With more ranks parameters of a model that is called twice land on two of them, which adds gradients in another order.
INSTANTIATE_TEST_SUITE_P(Ranks, WrittenBuffers, testing::Values(1, 2));

at::Tensor follow(const BodyRun<TwoNormsNet>& run) {
  const at::NoGradGuard no_grad;
  return run.forward(run.data * 3).mean();
}

TEST_P(WrittenBuffers, OfANormThatIsInEvaluationFirst) {
  expect_as_in_a_loop<TwoNormsNet>({.ranks = GetParam()}, [](const BodyRun<TwoNormsNet>& run) {
    run.net.eval();
    const at::Tensor loss = train_once(run);
    run.net.train();
    return loss + follow(run);
  });
}

TEST_P(WrittenBuffers, OfANormThatIsInEvaluationAndThenInTrainingAreRefusedBeforeOneBackward) {
  tests::run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = std::make_shared<TwoNormsNet>();
    DistributedModel model(net);
    auto step = smp::step([&](const at::Tensor& data) {
      net->eval();
      const at::Tensor seen = model(data);
      net->train();
      const at::Tensor loss = (seen + model(data * 3)).square().mean();
      model.backward(loss);
      return loss;
    });
    const std::string text = support::message_of([&] { step(tests::rows(4, 8, 1)); });
    EXPECT_TRUE(
        contains(text, "' to stay as aten::batch_norm has found it until the backward, got aten::batch_norm in between"))
        << text;
  });
}

TEST_P(WrittenBuffers, OfANormWhoseResultInEvaluationIsATarget) {
  expect_as_in_a_loop<TwoNormsNet>({.ranks = GetParam()}, [](const BodyRun<TwoNormsNet>& run) {
    run.net.eval();
    const at::Tensor target = run.forward(run.data).detach();
    run.net.train();
    const at::Tensor loss = torch::mse_loss(run.forward(run.data), target);
    run.backward(loss);
    return loss;
  });
}

TEST_P(WrittenBuffers, OfANormThatIsInTrainingFirst) {
  expect_as_in_a_loop<TwoNormsNet>({.ranks = GetParam()}, [](const BodyRun<TwoNormsNet>& run) {
    run.net.train();
    const at::Tensor followed = follow(run);
    run.net.eval();
    return followed + train_once(run);
  });
}

TEST_P(WrittenBuffers, OfANormWhoseModeFollowsTheData) {
  expect_as_in_a_loop<TwoNormsNet>({.ranks = GetParam(), .config = {.microbatches = 4}},
                                   [](const BodyRun<TwoNormsNet>& run) {
                                     run.net.train(run.data[0][0].item<float>() > 0);
                                     return train_once(run);
                                   });
}

TEST_P(WrittenBuffers, OfTheModelsOwn) {
  const auto look = [](auto&) {
    for (const auto& report : support::stage_reports()) EXPECT_GT(report.num_taped, 0) << report.stays_on_autograd;
  };
  expect_as_in_a_loop<CenterNet>({.ranks = GetParam(), .look = look}, train_once);
}

/// Puts other data in place of a buffer's and a weight's.
struct ReplacingNet : CenterNet {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x));
    center.set_data(center * 0.5 + hidden.detach().mean(0) * 0.5);
    last->weight.set_data(last->weight.data().clamp(-0.3, 0.3));
    return last(hidden * center.view({1, 8}));
  }
};

TEST_P(WrittenBuffers, WhoseDataAreReplaced) {
  const auto look = [](auto&) {
    for (const auto& report : support::stage_reports()) EXPECT_GT(report.num_taped, 0) << report.stays_on_autograd;
  };
  expect_as_in_a_loop<ReplacingNet>({.ranks = GetParam(), .config = {.microbatches = 3}, .look = look}, train_once);
}

/// Shrinks a weight before it uses it.
struct DecayNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x));
    {
      const at::NoGradGuard no_grad;
      second->weight.mul_(0.9);
    }
    return third(torch::tanh(second(hidden)));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
  torch::nn::Linear third = register_module("third", torch::nn::Linear(8, 4));
};

/// Weights in a list.
struct ClampedCells : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& weight : cells->all_weights()) weight.mul_(0.8);
    }
    return last(std::get<0>(cells(first(x).view({2, 2, 4}))).flatten(1));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::LSTM cells = register_module("cells", torch::nn::LSTM(torch::nn::LSTMOptions(4, 4).batch_first(true)));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
};

/// A table of words that each use renormalises, and that is the output layer too.
struct TiedNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor words = x.abs().mul(3).to(at::kLong).clamp(0, 9);
    return torch::nn::functional::linear(torch::tanh(middle(table(words).sum(1))), table->weight);
  }
  torch::nn::Embedding table =
      register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 8).max_norm(0.5)));
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(8, 8));
};

struct Way {
  int ranks;
  StageKind stage;
  bool reads;  // a value, before the backward: all forwards run before any backward
};

std::vector<Way> ways() {
  std::vector<Way> all;
  for (const int ranks : {1, 2, 3}) {
    for (const StageKind stage : {StageKind::kTape, StageKind::kAutograd}) {
      for (const bool reads : {false, true}) all.push_back({ranks, stage, reads});
    }
  }
  return all;
}

class WrittenWeights : public testing::TestWithParam<Way> {
 protected:
  template <class Net>
  static void check(const tests::LoopBody<Net>& body = train) {
    const Config config{.microbatches = 3, .stage = GetParam().stage};
    expect_as_in_a_loop<Net>({.ranks = GetParam().ranks, .steps = 5, .config = config}, body);
  }

  static at::Tensor train(const tests::MicrobatchRun& run) {
    const at::Tensor loss = run.forward(run.data).square().mean();
    if (GetParam().reads) run.trace.push_back(loss.item<double>());
    return run.trained(loss);
  }

  /// The text of what the loop throws, on every way that `fails`.
  template <class Net>
  static std::string error_of(bool fails, const tests::LoopBody<Net>& body = train) {
    const std::string text = support::message_of<std::exception>([&] { check<Net>(body); });
    EXPECT_EQ(text.empty(), !fails) << text;
    return text;
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, WrittenWeights, testing::ValuesIn(ways()), [](const testing::TestParamInfo<Way>& test) {
  return std::to_string(test.param.ranks) + (test.param.stage == StageKind::kTape ? "Tape" : "Autograd") +
         (test.param.reads ? "Read" : "");
});

TEST_P(WrittenWeights, InForward) { check<DecayNet>(); }
TEST_P(WrittenWeights, InAList) { check<ClampedCells>(); }
TEST_P(WrittenWeights, OfATiedEmbedding) { check<TiedNet>(); }

/// Shrinks the weight on one of two paths only.
struct BranchNet : DecayNet {
  at::Tensor forward(const at::Tensor& x) {
    if (x[0][0].item<float>() > 0) return DecayNet::forward(x);
    return third(torch::tanh(second(torch::tanh(first(x)))));
  }
};

TEST_P(WrittenWeights, OnOneOfTwoPaths) {
  const std::string text = error_of<BranchNet>(GetParam().reads);
  EXPECT_TRUE(text.empty() || contains(text, "'second.weight', which aten::t of module 'second' in microbatch ")) << text;
}

struct SometimesDecayNet : DecayNet {
  at::Tensor forward(const at::Tensor& x) {
    if (calls++ % 3 == 1) return DecayNet::forward(x);
    return third(torch::tanh(second(torch::tanh(first(x)))));
  }
  int calls = 0;
};

TEST_P(WrittenBuffers, AndWeightsInAMicrobatchThatTrainsNothing) {
  expect_as_in_a_loop<SometimesDecayNet>({.ranks = GetParam()}, [](const BodyRun<SometimesDecayNet>& run) {
    const bool trains = run.net.calls % 3 != 1;
    const at::Tensor loss = run.forward(run.data).square().mean();
    if (trains) run.backward(loss);
    return loss.detach();
  });
}

/// A buffer that every layer reads, but for steps that write to it, in which only the first does.
struct ShiftedNet : torch::nn::Module {
  at::Tensor forward(at::Tensor x) {
    if (writes) {
      const at::NoGradGuard no_grad;
      shift.mul_(0.5);
    }
    for (auto* layer : {&first, &second, &third, &last}) {
      x = torch::tanh((*layer)(x));
      if (!writes || layer == &first) x = x + shift;
    }
    return x;
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
  torch::nn::Linear third = register_module("third", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 8));
  at::Tensor shift = register_buffer("shift", torch::ones({8}));
  bool writes = false;
};

// On several ranks each has a copy by then.
TEST_P(WrittenWeights, OnlyLater) {
  const std::string text = error_of<ShiftedNet>(GetParam().ranks > 1, [](const BodyRun<ShiftedNet>& run) {
    run.net.writes = run.step > 1;
    return train(run);
  });
  EXPECT_TRUE(text.empty() || contains(text, "aten::mul_, which writes to 'shift'")) << text;
}

/// Writes to what it has used.
struct LateNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x));
    const at::Tensor used = multiplies ? hidden * scale : hidden + scale;
    {
      const at::NoGradGuard no_grad;
      (writes_weight ? first->weight : scale).mul_(0.5);
    }
    return last(used);
  }
  at::Tensor scale = register_buffer("scale", torch::ones({8}));
  bool multiplies = true, writes_weight = false;
};

// A sum needs nothing of its terms, and the first layer's input no gradient.
TEST_P(WrittenWeights, BehindAUseThatTheBackwardDoesNotNeed) {
  check<LateNet>([](const BodyRun<LateNet>& run) {
    run.net.multiplies = false;
    return train(run);
  });
  check<LateNet>([](const BodyRun<LateNet>& run) {
    run.net.writes_weight = true;
    return train(run);
  });
}

// As LibTorch refuses them, so that no twin runs.
TEST_P(WrittenWeights, BehindAUseThatTheBackwardNeedsAreRefused) {
  const auto train_net = [] {
    DistributedModel model(tests::make_filled<LateNet>());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      if (GetParam().reads) loss.item<double>();
      model.backward(loss);
    });
    step(tests::rows(6, 8, 1));
  };
  const Config config{.microbatches = 3, .stage = GetParam().stage, .log_level = LogLevel::kOff};
  const std::string text =
      support::message_of<std::exception>([&] { tests::run_smp_ranks(GetParam().ranks, config, train_net); });
  for (const char* part :
       {"modified by an inplace operation", "'scale'", "aten::mul_", "aten::mul has found it", "clone()"}) {
    EXPECT_TRUE(contains(text, part)) << text;
  }
}

/// Its buffer is written as an element of a list.
struct ListNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) {
    {
      const at::NoGradGuard no_grad;
      at::_foreach_mul_({scale}, 0.9);
    }
    return last(torch::tanh(first(x)) * scale);
  }
  at::Tensor scale = register_buffer("scale", torch::ones({8}));
};

TEST_P(WrittenWeights, OfAForeachOperator) { check<ListNet>(); }

/// Two names of one memory: some microbatches write to one, the others use the other.
struct TwoNamesNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x));
    if (x[0][0].item<float>() <= 0) return last(hidden * scale);
    const at::NoGradGuard no_grad;
    other_name.mul_(0.5);
    const at::AutoGradMode with_grad(true);
    return last(hidden);
  }
  at::Tensor scale = register_buffer("scale", torch::ones({8}));
  at::Tensor other_name = register_buffer("other_name", scale.view({8}));
};

TEST_P(WrittenWeights, UnderAnotherName) {
  const std::string text = error_of<TwoNamesNet>(GetParam().reads);
  EXPECT_TRUE(text.empty() || contains(text, "let the operator use a clone()")) << text;
}

}  // namespace
}  // namespace smp
