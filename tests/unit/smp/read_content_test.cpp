// What a body reads is the content of that moment, whatever is written later; also of tensors brought to the CPU.
#include <ATen/autocast_mode.h>

#include "tests/support/messages.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::contains;
using support::message_of;
using tests::BodyRun;
using tests::expect_as_in_a_loop;
using tests::rows;
using tests::run_smp_ranks;
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

// Its gradient of many numbers is that of the rank which trains it, added up as in a loop.
TEST_P(ReadContent, OfALargerParameterBeforeItsFirstUse) {
  check_buffers([](const BodyRun<CountNet>& run) {
    run.trace.push_back(run.net.last->weight.sum().template item<double>());
    return trained(run, (run.forward(run.data) * run.net.scale).square().mean());
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

TEST_P(ReadContent, OfABufferOnTheCpuFollowsWrites) {
  check_buffers([](const BodyRun<CountNet>& run) {
    const at::NoGradGuard no_grad;
    const at::Tensor here = run.net.count.cpu(), seen = run.net.count.clone().cpu(), part = run.net.count.cpu()[1];
    run.net.count.add_(1);
    run.trace.push_back(here.sum().item<double>());
    run.trace.push_back(part.item<double>());
    run.trace.push_back(seen.sum().item<double>());
    run.net.count[1].mul_(3);
    run.trace.push_back(here.sum().item<double>());
    run.trace.push_back(*part.data_ptr<float>());
    const at::AutoGradMode with_grad(true);
    return trained(run, (run.forward(run.data) * here.sum()).square().mean());
  });
}

// What is run for it is not under the autocast of the place that asks.
TEST_P(ReadContent, WithinAutocastOnly) {
  check([](const BodyRun<SmallNet>& run) {
    const c10::DeviceType device = runtime::this_ranks_device().type;
    const at::Tensor output = run.forward(run.data);
    at::autocast::set_autocast_enabled(device, true);
    run.trace.push_back(output.sum().item<double>());
    run.trace.push_back(output.cpu().data_ptr<float>()[1]);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device, false);
    return trained(run, output.square().mean());
  });
}

struct RestingNet : SmallNet {
  at::Tensor forward(const at::Tensor& x) { return torch::dropout(SmallNet::forward(x), /*p=*/0, /*train=*/true); }
};

// The first read of a step is one that smp makes.
TEST_P(ReadContent, OnTheCpuThatAnOperatorWritesTo) {
  expect_as_in_a_loop<RestingNet>({.ranks = GetParam()}, [](const BodyRun<RestingNet>& run) {
    const at::Tensor output = run.forward(run.data), zeros = torch::zeros({4}), there = zeros.cpu();
    zeros.copy_(output.detach()[0]);
    run.trace.push_back(there.sum().item<double>());
    return trained(run, output.square().mean() * there.sum().to(run.data.device()));
  });
}

TEST_P(ReadContent, TwiceOnTheCpuAreTwoTensors) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), first = (output.detach() * 1).cpu();
    first.data_ptr<float>()[0] = 7;  // no operator reads it again
    run.trace.push_back((output.detach() * 1).cpu().data_ptr<float>()[0]);
    return trained(run, output.square().mean());
  });
}

TEST_P(ReadContent, OnTheCpuOfAnotherTypeKeepsItsGradient) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor here = run.forward(run.data).cpu().to(at::kCPU, at::kDouble);
    run.trace.push_back(here.data_ptr<double>()[0]);
    return trained(run, here.square().mean());
  });
}

TEST_P(ReadContent, OnTheCpuDrawsTheNumbersOfTheStep) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    DistributedModel model(tests::make_net());
    std::vector<double> seen;
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor output = model(data), here = output.detach().mean().cpu();
      const at::Tensor noise = torch::rand_like(here), kept = torch::dropout(output.cpu(), 0.5, true);
      at::Tensor filled = here.clone();
      filled.uniform_();
      seen.push_back(*noise.data_ptr<float>() + kept.sum().item<float>() + *filled.data_ptr<float>());
      model.backward(kept.sum() * noise);
      return noise + kept.sum() + filled;
    });
    torch::manual_seed(5);
    const at::Tensor want = torch::rand({3});
    torch::manual_seed(5);
    for (int s = 0; s < 3; ++s) {
      seen.clear();
      const std::vector<at::Tensor> returned = step(rows(4, 8, 1)).outputs();
      for (size_t m = 0; m < seen.size(); ++m) EXPECT_EQ(returned[m].item<float>(), static_cast<float>(seen[m]));
    }
    if (pp_size() == 1) {
      EXPECT_TRUE(torch::equal(torch::rand({3}), want));
    }
  });
}

std::string refusal_of(int ranks, const std::function<at::Tensor(const at::Tensor& output)>& loss_of) {
  std::string text;
  run_smp_ranks(ranks, {.microbatches = 2}, [&] {
    DistributedModel model(tests::make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = loss_of(model(data));
      model.backward(loss);
      return loss;
    });
    const std::string refusal = message_of<std::exception>([&] { step(rows(4, 8, 1)); });
    for (const at::Tensor& parameter : model.local_parameters()) EXPECT_FALSE(parameter.grad().defined());
    if (pp_rank() == 0) text = refusal;
  });
  return text;
}

TEST_P(ReadContent, FirstWithoutGradients) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data);
    {
      const at::NoGradGuard no_grad;
      run.trace.push_back(output.cpu().sum().item<double>());
      run.trace.push_back(output.to(at::kFloat).sum().item<double>());
    }
    return trained(run, output.square().mean());
  });
}

TEST_P(ReadContent, FirstInInferenceMode) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data);
    {
      const c10::InferenceMode inference;
      run.trace.push_back(output.sum().item<double>());
      run.trace.push_back((output * 2).cpu().sum().item<double>());
    }
    return trained(run, output.square().mean());
  });
}

TEST_P(ReadContent, OfTheLossWithoutGradients) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor loss = run.forward(run.data).square().mean();
    {
      const at::NoGradGuard no_grad;
      run.trace.push_back(loss.cpu().item<double>());
    }
    return trained(run, loss);
  });
}

TEST_P(ReadContent, OnTheCpuRequiresAGradientAsInALoop) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), here = output.cpu(), twice = here * 2, fixed = (here * 3).detach_();
    const at::Tensor others = torch::zeros_like(here);
    others.add_(1);
    run.trace.push_back(here.requires_grad() + 2 * twice.requires_grad() + 4 * twice[0].requires_grad());
    run.trace.push_back(fixed.requires_grad() + 2 * here.detach().requires_grad() + 4 * others.requires_grad());
    others.mul_(twice);
    run.trace.push_back(others.requires_grad());
    const at::NoGradGuard no_grad;
    run.trace.push_back((twice * 2).requires_grad() + 2 * twice.requires_grad());
    const at::AutoGradMode with_grad(true);
    return trained(run, ((twice * fixed + others).square().mean()).to(output.device()));
  });
}

TEST_P(ReadContent, OnTheCpuThatIsDroppedIsNoLoss) {
  const std::string text = refusal_of(GetParam(), [](const at::Tensor& output) {
    (void)output.sum().cpu();
    return at::Tensor();
  });
  EXPECT_TRUE(contains(text, "got an undefined tensor")) << text;
}

struct Turned : torch::autograd::Function<Turned> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, bool writes) {
    if (!writes) return x.view_as(x);
    context->mark_dirty({x.mul_(2)});
    return x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list grad) {
    return {grad[0].neg(), at::Tensor()};
  }
};

TEST_P(ReadContent, OnTheCpuIsRefusedToACustomFunction) {
  const std::function<at::Tensor(const at::Tensor&)> ways[] = {
      [](const at::Tensor& here) { return Turned::apply(here, false).mean(); },
      [](const at::Tensor& here) { return Turned::apply(here * 1, true).mean(); },
      [](const at::Tensor& here) {  // whose result the body drops
        const at::Tensor copy = here.clone();
        Turned::apply(copy.narrow(0, 0, 1), true);
        return copy.mean();
      }};
  for (const auto& way : ways) {
    const std::string text =
        refusal_of(GetParam(), [&](const at::Tensor& output) { return way(output.cpu()).to(output.device()); });
    EXPECT_TRUE(contains(text, "in or after module 'fourth': expected gradient functions that operators have made")) << text;
  }
}

TEST_P(ReadContent, OnTheCpuIsRefusedWhereItIsHookedOrTrained) {
  const std::string hooked = refusal_of(GetParam(), [](const at::Tensor& output) {
    const at::Tensor here = output.cpu();
    here.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    return here.mean().to(output.device());
  });
  EXPECT_TRUE(contains(hooked, "expected gradient hooks on parameters only")) << hooked;
  const std::string trained = refusal_of(GetParam(), [](const at::Tensor& output) {
    return (output.detach().cpu().requires_grad_() * 2).to(output.device()).mean() + output.mean();
  });
  EXPECT_TRUE(contains(trained, "of the step body that was made to require a gradient (requires_grad_)")) << trained;
}

TEST_P(ReadContent, OnTheCpuIsRefusedWhereAShapeWouldLoseTheGradient) {
  const std::string text = refusal_of(GetParam(), [](const at::Tensor& output) {
    const at::Tensor each = output.square().mean(1).cpu();
    return each.mean() + each.masked_select(each > 0).sum();
  });
  EXPECT_TRUE(contains(text, "aten::masked_select, in or after module 'fourth': the shape of its result depends on data"))
      << text;
}

TEST_P(ReadContent, OnTheCpuMaySelectWithoutGradient) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), here = output.detach().cpu();
    return trained(run, output.square().mean() * here.masked_select(here > -1e3).sum());
  });
}

TEST_P(ReadContent, OnTheCpuIsRefusedAfterAWriteThroughAPointer) {
  const std::string text = refusal_of(GetParam(), [](const at::Tensor& output) {
    const at::Tensor weights = output.detach().clone().cpu();
    weights.data_ptr<float>()[3] = 2;
    return (output * weights).square().mean();
  });
  EXPECT_TRUE(contains(text,
                       "aten::mul, in or after module 'fourth': expected tensors that the body has brought to the CPU to be "
                       "written by operators only, got one of sizes [2, 4] that was written through a pointer."))
      << text;
}

TEST_P(ReadContent, OnTheCpuIsRefusedWhereItIsCopiedAfterAWriteThroughAPointer) {
  const std::string text = refusal_of(GetParam(), [](const at::Tensor& output) {
    const at::Tensor weights = output.detach().clone().cpu();
    weights.data_ptr<float>()[3] = 2;
    return (output * weights.to(output.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true)).square().mean();
  });
  EXPECT_TRUE(
      contains(text, "aten::to, in or after module 'fourth': expected tensors that the body has brought to the CPU to"))
      << text;
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReadContent, testing::Values(1, 2));

}  // namespace
}  // namespace smp
