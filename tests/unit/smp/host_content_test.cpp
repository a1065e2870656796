// Bodies that only ranks on the CPU take: there a tensor and its cpu() are one, and so are tensors of both kinds.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyRun;
using tests::SmallNet;

struct ScaledNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
  at::Tensor scale = register_parameter("scale", torch::ones({1}));
  at::Tensor count = register_buffer("count", torch::zeros({3}));
};

class HostContent : public testing::TestWithParam<int> {
 protected:
  template <class Net>
  static void check(const tests::LoopBody<Net>& body) {
    tests::expect_as_in_a_loop<Net>({.ranks = GetParam()}, body);
  }
  template <class Net>
  static at::Tensor trained(const BodyRun<Net>& run, const at::Tensor& loss) {
    run.backward(loss);
    return loss;
  }
};

struct TwoNamesNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(first(x) * all.sum()); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
  at::Tensor all = register_buffer("all", torch::ones({3}));
  at::Tensor part = register_buffer("part", all.narrow(0, 1, 2));
};

TEST_P(HostContent, FollowsWrites) {
  check<SmallNet>([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data);
    at::Tensor total = output.detach().sum().clone().cpu();
    total.add_(output.detach().abs().sum());
    run.trace.push_back(*total.data_ptr<float>());
    total.copy_(output.detach().max());
    run.trace.push_back(total.item<double>());
    total.mul_(2);
    run.trace.push_back(*total.data_ptr<float>());
    const at::Tensor again = output.detach().cpu();
    again[0].zero_();
    run.trace.push_back(again.cpu().abs().sum().item<double>());
    run.trace.push_back((output * total).to(at::kCPU, at::kDouble).sum().item<double>());
    return trained(run, (output * total).square().mean() + (output * again).sum());
  });
}

TEST_P(HostContent, FollowsWritesToWhatWasBrought) {
  check<SmallNet>([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), here = output.detach() * 1, there = here.cpu(), first = there[0];
    here.mul_(2);
    run.trace.push_back(there.sum().item<double>());
    run.trace.push_back(*first.data_ptr<float>());
    here.add_(there);
    run.trace.push_back(there.data_ptr<float>()[1]);
    there.mul_(2);
    run.trace.push_back(here.sum().item<double>());
    const at::Tensor loss = (output * there).square().mean();
    return trained(run, *first.data_ptr<float>() > 0 ? loss : loss * 3);
  });
}

TEST_P(HostContent, OfAParameter) {
  check<ScaledNet>([](const BodyRun<ScaledNet>& run) {
    run.trace.push_back(run.net.first->bias.cpu().sum().item<double>());
    run.trace.push_back(run.net.first->bias.contiguous().sum().item<double>());
    const at::Tensor loss = (run.forward(run.data) * run.net.scale.cpu()).square().mean();
    return trained(run, loss);
  });
}

TEST_P(HostContent, OfABufferIsThatOfItsOtherName) {
  check<TwoNamesNet>([](const BodyRun<TwoNamesNet>& run) {
    {
      const at::NoGradGuard no_grad;
      run.net.all.add_(1);
    }
    run.trace.push_back(run.net.part.sum().item<double>());
    const at::Tensor loss = run.forward(run.data).square().mean();
    return trained(run, loss);
  });
}

TEST_P(HostContent, OfABufferFollowsWritesUnderAnotherName) {
  check<ScaledNet>([](const BodyRun<ScaledNet>& run) {
    const at::Tensor here = run.net.count.cpu();
    run.net.count.data().add_(1);
    run.trace.push_back(here.sum().item<double>());
    return trained(run, run.forward(run.data).square().mean());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, HostContent, testing::Values(1, 2));

}  // namespace
}  // namespace smp
