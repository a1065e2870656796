// What a body reads is the content of that moment, whatever is written later.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyRun;
using tests::expect_as_in_a_loop;
using tests::SmallNet;

struct CountNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
  at::Tensor scale = register_parameter("scale", torch::ones({1}));
  at::Tensor count = register_buffer("count", torch::zeros({3}));
};

class ReadContent : public testing::TestWithParam<int> {
 protected:
  static void check(const tests::LoopBody<SmallNet>& body) { expect_as_in_a_loop<SmallNet>({.ranks = GetParam()}, body); }
  static void check_buffers(const tests::LoopBody<CountNet>& body) {
    expect_as_in_a_loop<CountNet>({.ranks = GetParam()}, body);
  }
  template <class Net>
  static at::Tensor trained(const BodyRun<Net>& run, const at::Tensor& loss) {
    run.backward(loss);
    return loss;
  }
};

TEST_P(ReadContent, IsThatBeforeALaterWrite) {
  check([](const BodyRun<SmallNet>& run) {
    at::Tensor loss = run.forward(run.data).square().mean();
    run.trace.push_back(loss.item<double>());
    loss += 1;
    run.trace.push_back(loss.item<double>());
    run.trace.push_back(loss.item<double>());
    loss *= 2;
    return trained(run, loss);
  });
}

TEST_P(ReadContent, IsThatBeforeALaterWriteThroughAView) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), sums = output.detach().sum(0);
    run.trace.push_back(sums.max().item<double>());
    run.trace.push_back(sums[1].item<double>());
    sums.slice(0, 1, 3).zero_();
    run.trace.push_back(sums.cpu().data_ptr<float>()[1]);
    sums[1] += 3;
    run.trace.push_back(sums[1].item<double>());
    return trained(run, (output * sums).square().mean());
  });
}

TEST_P(ReadContent, IsThatOfItsWay) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data);
    at::Tensor loss = output.square().mean();
    if (run.step % 3 > 0) run.trace.push_back(loss.item<double>());
    loss += output.abs().mean();
    if (run.step % 3 < 2) run.trace.push_back(loss.item<double>());
    return trained(run, run.step % 2 == 0 ? loss : loss * 2);
  });
}

TEST_P(ReadContent, OfABufferIsThatOfTheMicrobatch) {
  check_buffers([](const BodyRun<CountNet>& run) {
    run.trace.push_back(run.net.count[0].template item<double>());
    run.net.count.add_(1);
    run.trace.push_back(run.net.count[1].template item<double>());
    const at::Tensor output = run.forward(run.data);
    run.net.count[1] += 2;
    run.trace.push_back(run.net.count.sum().template item<double>());
    run.trace.push_back(run.net.count.cpu().template data_ptr<float>()[1]);
    return trained(run, (output * run.net.scale).square().mean());
  });
}

TEST_P(ReadContent, OfAParameterBeforeItsFirstUse) {
  check_buffers([](const BodyRun<CountNet>& run) {
    run.trace.push_back(run.net.scale.template item<double>());
    const at::Tensor output = run.forward(run.data);
    const at::Tensor loss = (output * run.net.scale).square().mean();
    run.trace.push_back(run.net.scale.template item<double>());
    return trained(run, loss);
  });
}

TEST_P(ReadContent, OfAParameterAndABufferAfterOtherReads) {
  check_buffers([](const BodyRun<CountNet>& run) {
    const at::Tensor output = run.forward(run.data);
    run.trace.push_back(output.sum().template item<double>());
    run.trace.push_back(run.net.scale.template item<double>());
    if (run.step == 2) run.trace.push_back(run.net.count.sum().template item<double>());
    return trained(run, (output * run.net.scale).square().mean());
  });
}

TEST_P(ReadContent, OfAParameterOnSomeWaysOnly) {
  check_buffers([](const BodyRun<CountNet>& run) {
    if (run.step % 2 == 1) run.trace.push_back(run.net.scale.template item<double>());
    const at::Tensor output = run.forward(run.data);
    return trained(run, run.step == 3 ? output.abs().mean() : (output * run.net.scale).square().mean());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReadContent, testing::Values(1, 2));

}  // namespace
}  // namespace smp
