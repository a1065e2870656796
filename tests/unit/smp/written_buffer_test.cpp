// Buffers and weights that one microbatch writes to before an earlier one has run its backward: gradients are those of the
// content that its forward saw. Where its own forward has written to what the backward needs, LibTorch refuses, and so do
// we.
#include "tests/support/messages.h"
#include "tests/support/split_run.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyRun;
using tests::expect_as_in_a_loop;
using tests::Loop;

struct NormNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(second_norm(middle(norm(first(x))))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(8));
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(8, 8));
  torch::nn::BatchNorm1d second_norm = register_module("second_norm", torch::nn::BatchNorm1d(8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
};

struct CenterNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x));
    {
      const at::NoGradGuard no_grad;
      center.mul_(0.5).add_(hidden.mean(0), 0.5);
    }
    return second(hidden * center.view({1, 8}));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 4));
  at::Tensor center = register_buffer("center", torch::ones({8}));
};

class WrittenBuffers : public testing::TestWithParam<int> {
 protected:
  template <class Net>
  static at::Tensor train(const BodyRun<Net>& run, const at::Tensor& x) {
    const at::Tensor loss = run.forward(x).square().mean();
    run.backward(loss);
    return loss;
  }
};
// With more ranks parameters of a model that is called twice land on two of them, which adds gradients in another order.
INSTANTIATE_TEST_SUITE_P(Ranks, WrittenBuffers, testing::Values(1, 2));

at::Tensor follow(const BodyRun<NormNet>& run) {
  const at::NoGradGuard no_grad;
  return run.forward(run.data * 3).mean();
}

TEST_P(WrittenBuffers, OfANormThatIsInEvaluationFirst) {
  expect_as_in_a_loop<NormNet>({.ranks = GetParam()}, [](const BodyRun<NormNet>& run) {
    run.net.eval();
    const at::Tensor loss = train(run, run.data);
    run.net.train();
    return loss + follow(run);
  });
}

TEST_P(WrittenBuffers, OfANormThatIsInEvaluationAndThenInTrainingAreRefusedBeforeOneBackward) {
  tests::run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = std::make_shared<NormNet>();
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
    EXPECT_TRUE(support::contains(
        text, "' to stay as aten::batch_norm has found it until the backward, got aten::batch_norm in between"))
        << text;
  });
}

TEST_P(WrittenBuffers, OfANormWhoseResultInEvaluationIsATarget) {
  expect_as_in_a_loop<NormNet>({.ranks = GetParam()}, [](const BodyRun<NormNet>& run) {
    run.net.eval();
    const at::Tensor target = run.forward(run.data).detach();
    run.net.train();
    const at::Tensor loss = torch::mse_loss(run.forward(run.data), target);
    run.backward(loss);
    return loss;
  });
}

TEST_P(WrittenBuffers, OfANormThatIsInTrainingFirst) {
  expect_as_in_a_loop<NormNet>({.ranks = GetParam()}, [](const BodyRun<NormNet>& run) {
    run.net.train();
    const at::Tensor followed = follow(run);
    run.net.eval();
    return followed + train(run, run.data);
  });
}

TEST_P(WrittenBuffers, OfANormWhoseModeFollowsTheData) {
  expect_as_in_a_loop<NormNet>({.ranks = GetParam(), .microbatches = 4}, [](const BodyRun<NormNet>& run) {
    run.net.train(run.data[0][0].item<float>() > 0);
    return train(run, run.data);
  });
}

TEST_P(WrittenBuffers, OfTheModelsOwn) {
  const auto look = [] {
    for (const auto& report : support::stage_reports()) EXPECT_GT(report.num_taped, 0) << report.stays_on_autograd;
  };
  expect_as_in_a_loop<CenterNet>({.ranks = GetParam(), .look = look},
                                 [](const BodyRun<CenterNet>& run) { return train(run, run.data); });
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
  static Loop loop() { return {.ranks = GetParam().ranks, .steps = 5, .stage = GetParam().stage}; }

  template <class Net>
  static at::Tensor train(const BodyRun<Net>& run) {
    const at::Tensor loss = run.forward(run.data).square().mean();
    if (GetParam().reads) run.trace.push_back(loss.template item<double>());
    run.backward(loss);
    return loss;
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, WrittenWeights, testing::ValuesIn(ways()), [](const testing::TestParamInfo<Way>& test) {
  return std::to_string(test.param.ranks) + (test.param.stage == StageKind::kTape ? "Tape" : "Autograd") +
         (test.param.reads ? "Read" : "");
});

TEST_P(WrittenWeights, InForward) { expect_as_in_a_loop<DecayNet>(loop(), train<DecayNet>); }
TEST_P(WrittenWeights, InAList) { expect_as_in_a_loop<ClampedCells>(loop(), train<ClampedCells>); }
TEST_P(WrittenWeights, OfATiedEmbedding) { expect_as_in_a_loop<TiedNet>(loop(), train<TiedNet>); }

/// Shrinks the weight on one of two paths only.
struct BranchNet : DecayNet {
  at::Tensor forward(const at::Tensor& x) {
    if (x[0][0].item<float>() > 0) return DecayNet::forward(x);
    return third(torch::tanh(second(torch::tanh(first(x)))));
  }
};

TEST_P(WrittenWeights, OnOneOfTwoPaths) {
  try {
    expect_as_in_a_loop<BranchNet>(loop(), train<BranchNet>);
    EXPECT_FALSE(GetParam().reads) << "expected an error";
  } catch (const std::exception& error) {
    const std::string text = error.what();
    EXPECT_TRUE(GetParam().reads) << text;
    EXPECT_NE(text.find("'second.weight', which aten::t of module 'second' in microbatch "), std::string::npos) << text;
  }
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
  try {
    expect_as_in_a_loop<ShiftedNet>(loop(), [](const BodyRun<ShiftedNet>& run) {
      run.net.writes = run.step > 1;
      return train(run);
    });
    EXPECT_EQ(GetParam().ranks, 1) << "expected an error";
  } catch (const std::exception& error) {
    EXPECT_GT(GetParam().ranks, 1) << error.what();
    EXPECT_NE(std::string(error.what()).find("aten::mul_, which writes to 'shift'"), std::string::npos) << error.what();
  }
}

/// Writes to what it has used.
struct LateNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x));
    const at::Tensor used = multiplies ? hidden * scale : hidden + scale;
    {
      const at::NoGradGuard no_grad;
      (writes_weight ? first->weight : scale).mul_(0.5);
    }
    return second(used);
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 4));
  at::Tensor scale = register_buffer("scale", torch::ones({8}));
  bool multiplies = true, writes_weight = false;
};

// A sum needs nothing of its terms, and the first layer's input no gradient.
TEST_P(WrittenWeights, BehindAUseThatTheBackwardDoesNotNeed) {
  expect_as_in_a_loop<LateNet>(loop(), [](const BodyRun<LateNet>& run) {
    run.net.multiplies = false;
    return train(run);
  });
  expect_as_in_a_loop<LateNet>(loop(), [](const BodyRun<LateNet>& run) {
    run.net.writes_weight = true;
    return train(run);
  });
}

TEST_P(WrittenWeights, BehindAUseThatTheBackwardNeedsAreRefused) {
  const auto train_once = [] {
    DistributedModel model(tests::make_filled<LateNet>());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      if (GetParam().reads) loss.item<double>();
      model.backward(loss);
    });
    step(tests::rows(6, 8, 1));
  };
  try {
    tests::run_smp_ranks(GetParam().ranks, {.microbatches = 3, .stage = GetParam().stage, .log_level = LogLevel::kOff},
                         train_once);
    ADD_FAILURE() << "expected an error";
  } catch (const std::exception& error) {
    const std::string text = error.what();
    for (const char* part :
         {"modified by an inplace operation", "'scale'", "aten::mul_", "aten::mul has found it", "clone()"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

/// Its buffer is written as an element of a list.
struct ListNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    {
      const at::NoGradGuard no_grad;
      at::_foreach_mul_({scale}, 0.9);
    }
    return second(torch::tanh(first(x)) * scale);
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 4));
  at::Tensor scale = register_buffer("scale", torch::ones({8}));
};

TEST_P(WrittenWeights, OfAForeachOperator) { expect_as_in_a_loop<ListNet>(loop(), train<ListNet>); }

/// Two names of one memory: some microbatches write to one, the others use the other.
struct TwoNamesNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x));
    if (x[0][0].item<float>() <= 0) return second(hidden * scale);
    const at::NoGradGuard no_grad;
    other_name.mul_(0.5);
    const at::AutoGradMode with_grad(true);
    return second(hidden);
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 4));
  at::Tensor scale = register_buffer("scale", torch::ones({8}));
  at::Tensor other_name = register_buffer("other_name", scale.view({8}));
};

TEST_P(WrittenWeights, UnderAnotherName) {
  try {
    expect_as_in_a_loop<TwoNamesNet>(loop(), train<TwoNamesNet>);
    EXPECT_FALSE(GetParam().reads) << "expected an error";
  } catch (const std::exception& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("let the operator use a clone()"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace smp
