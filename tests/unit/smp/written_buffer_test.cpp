// Buffers that one microbatch writes to before an earlier one has run its backward: gradients are those of the content that
// its forward saw.
#include "tests/support/split_run.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyRun;
using tests::expect_as_in_a_loop;

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
  expect_as_in_a_loop<CenterNet>({.ranks = GetParam(), .look = look}, [](const BodyRun<CenterNet>& run) { return train(run, run.data); });
}

}  // namespace
}  // namespace smp
