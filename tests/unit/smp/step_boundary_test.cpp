// What a step takes in, hands on between stages and gives back, where tensors are not plain or ranks do not agree.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using tests::BodyRun;
using tests::expect_as_in_a_loop;
using tests::expect_twins;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;

// Two products of complex matrices, with a lazy conjugate between them and behind them.
struct ComplexNet : torch::nn::Module {
  explicit ComplexNet(bool splits) {
    if (splits) smp::set_partition(*first, 0);
    if (splits) smp::set_partition(*second, 1);
  }
  struct Part : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", torch::complex(rows(4, 4, 5).contiguous(), rows(4, 4, 6).contiguous()));
  };
  at::Tensor forward(const at::Tensor& x) { return x.matmul(first->weight).conj().matmul(second->weight).conj(); }
  std::shared_ptr<Part> first = register_module("first", std::make_shared<Part>());
  std::shared_ptr<Part> second = register_module("second", std::make_shared<Part>());
};

TEST(StepBoundary, LazyConjugatesKeepTheirMeaning) {
  run_smp_ranks(2, {.microbatches = 1, .auto_partition = false}, [] {
    ComplexNet twin(false);
    const auto net = std::make_shared<ComplexNet>(true);
    DistributedModel<ComplexNet> model(net);
    auto step = smp::step([&](at::Tensor x) {
      const at::Tensor y = model(x);
      const at::Tensor loss = at::real(y * y.conj()).sum();
      model.backward(loss);
      return std::make_tuple(loss, y, at::imag(y));
    });
    const at::Tensor x = torch::complex(rows(2, 4, 1), rows(2, 4, 2));
    const auto [losses, outputs, imaginary] = step(x);
    const at::Tensor y = twin.forward(x), loss = at::real(y * y.conj()).sum();
    loss.backward();
    expect_bit_equal(losses[0], loss, "loss");
    expect_bit_equal(outputs[0], y.detach().resolve_conj(), "output");
    expect_bit_equal(imaginary[0], at::imag(y).detach().resolve_neg().contiguous(), "imaginary part");
    expect_twins(model, twin, "complex");
  });
}

TEST(StepResults, AreContiguousOnEveryRank) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    DistributedModel<SmallNet> model(make_net());
    auto step = smp::step([&](at::Tensor x) { return model(x).t(); });
    const at::Tensor result = step(rows(3, 8, 1))[0];
    EXPECT_TRUE(result.is_contiguous());
    EXPECT_EQ(result.sizes(), (std::vector<int64_t>{4, 3}));
  });
}

TEST(Evaluation, DrawsNewNumbersEachTimeAndLeavesTrainingAlone) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    const auto train = [](int evaluations) {
      DistributedModel<SmallNet> model(make_net(at::kFloat, 0.5));
      auto step = tests::training_step(model);
      auto evaluate = smp::step([&](at::Tensor x) { return torch::rand_like(model(x)); });
      step(rows(4, 8, 1), rows(4, 4, 2));
      std::vector<at::Tensor> draws;
      for (int e = 0; e < evaluations; ++e) draws.push_back(evaluate(rows(4, 8, 1)).concat());
      for (size_t e = 1; e < draws.size(); ++e) EXPECT_FALSE(torch::equal(draws[e - 1], draws[e])) << e;
      return step(rows(4, 8, 1), rows(4, 4, 2)).outputs();
    };
    expect_bit_equal(train(3), train(0), "the step after evaluations");
  });
}

// Drops layers where it is told to, as LayerDrop does.
struct DroppingNet : SmallNet {
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden = drops_first ? x : torch::relu(first(x));
    if (!drops_second) hidden = torch::relu(second(hidden));
    return fourth(torch::relu(third(hidden)));
  }
  bool drops_first = false, drops_second = false;
};

TEST(Planning, MicrobatchesOfOtherStructureInTheFirstStepFollowThePlacementOfTheFirst) {
  expect_as_in_a_loop<DroppingNet>({.ranks = 2, .config = {.microbatches = 2}}, [](const BodyRun<DroppingNet>& run) {
    run.net.drops_second = run.microbatch == 1;
    return tests::train_once(run);
  });
}

TEST(SeveralPrograms, LeaveAStageWithoutWork) {
  expect_as_in_a_loop<DroppingNet>({.ranks = 2, .config = {.microbatches = 2}}, [](const BodyRun<DroppingNet>& run) {
    run.net.drops_first = run.net.drops_second = run.microbatch == 1;
    return tests::train_once(run);
  });
}

TEST(Refusal, OfABodyThatThrowsAnythingReachesEveryRank) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    DistributedModel<SmallNet> model(make_net());
    bool throws = true;
    auto step = smp::step([&](at::Tensor x) {
      if (throws) throw 7;
      return model(x);
    });
    const auto run = [&] { step(rows(2, 8, 1)); };
    if (rank() == 0) {
      EXPECT_THROW(run(), int);
    } else {
      EXPECT_THROW(run(), c10::Error);
    }
    throws = false;
    EXPECT_EQ(step(rows(2, 8, 1)).concat().size(0), 2);
  });
}

TEST(Refusal, OfReplicasThatCallDifferentStepsNamesBoth) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 1}, [] {
    DistributedModel<SmallNet> model(make_net());
    auto train = tests::training_step(model);
    auto evaluate = smp::step([&](at::Tensor x, at::Tensor) { return model(x); });
    train(rows(2, 8, 1), rows(2, 4, 2));
    try {
      if (smp::dp_rank() == 0) {
        train(rows(2, 8, 1), rows(2, 4, 2));
      } else {
        evaluate(rows(2, 8, 1), rows(2, 4, 2));
      }
      ADD_FAILURE() << "expected a refusal";
    } catch (const c10::ValueError& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_TRUE(contains(text, "step function 0 (training) after 1 training steps, gradients averaged on replica 0"))
          << text;
      EXPECT_TRUE(contains(text, "step function 1 (evaluation) after 1 training steps on replica 1")) << text;
    }
    evaluate(rows(2, 8, 1), rows(2, 4, 2));
  });
}

struct LookupNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) { return embedding(tokens); }
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(4, 8));
};

TEST(StepErrors, NameTheOperatorAndTheMicrobatch) {
  run_smp_ranks(1, {.microbatches = 2}, [] {
    DistributedModel<LookupNet> model(std::make_shared<LookupNet>());
    auto step = smp::step([&](at::Tensor tokens) { return model(tokens); });
    try {
      step(torch::tensor({1, 9}).view({2, 1}));
      ADD_FAILURE() << "expected an error";
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_TRUE(contains(text, "index out of range")) << text;
      EXPECT_TRUE(contains(text, "in aten::embedding")) << text;
      EXPECT_TRUE(contains(text, "microbatch 1")) << text;
    }
  });
}

TEST(StepBodies, ThatUseGradientsOfEarlierStepsAreRefused) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    bool looks = false;
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return looks ? loss + net->first->weight.grad()[0].norm() : loss;
    });
    step(rows(4, 8, 1));
    looks = true;
    const std::string text = support::message_of<c10::ValueError>([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(text, "gradient of 'first.weight'")) << text;
  });
}

TEST(StepBodies, ThatClearGradientsAreRefusedAndLoseNone) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    bool clears = false, throws = false;
    auto step = smp::step([&](at::Tensor data) {
      for (at::Tensor& parameter : net->parameters()) {
        if (clears) parameter.mutable_grad() = at::Tensor();  // zero_grad() calls an operator on it, and is refused for that
      }
      if (throws) throw std::runtime_error("not yet");
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return loss;
    });
    step(rows(4, 8, 1));
    std::vector<at::Tensor> before;
    for (const at::Tensor& parameter : model.local_parameters()) before.push_back(parameter.grad().clone());
    clears = true;
    const std::string text = support::message_of<c10::ValueError>([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(text, "leaves gradients as they are")) << text;
    throws = true;
    EXPECT_TRUE(contains(support::message_of<std::exception>([&] { step(rows(4, 8, 1)); }), "not yet"));
    const std::vector<at::Tensor> parameters = model.local_parameters();
    for (size_t i = 0; i < parameters.size(); ++i) expect_bit_equal(parameters[i].grad(), before[i], "gradient");
  });
}

TEST(StepErrors, NameATensorOfAnotherShapeOnAnotherRank) {
  const std::string text = support::message_of<std::exception>([] {
    run_smp_ranks(2, {.microbatches = 2}, [] {
      torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::ReLU(), torch::nn::Linear(8, smp::rank() == 0 ? 4 : 5));
      DistributedModel model(net);
      auto step = smp::step([&](at::Tensor data) { return model(data); });
      step(rows(4, 8, 1));
    });
  });
  EXPECT_TRUE(contains(text, "the same model on all ranks")) << text;
}

}  // namespace
}  // namespace smp
