// What a body reads is the content of that moment, whatever is written later; also of tensors brought to the CPU.
#include <ATen/autocast_mode.h>

#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyCase;
using tests::BodyRun;
using tests::CountNet;
using tests::expect_as_in_a_loop;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using ContentRun = BodyRun<CountNet>;

std::vector<BodyCase<CountNet>> content_reads() {
  return {
      {"IsThatBeforeALaterWrite",
       [](const ContentRun& run) {
         at::Tensor loss = run.forward(run.data).square().mean();
         run.trace.push_back(loss.item<double>());
         loss += 1;
         run.trace.push_back(loss.item<double>());
         run.trace.push_back(loss.item<double>());
         loss *= 2;
         return run.trained(loss);
       }},
      {"IsThatBeforeALaterWriteThroughAView",
       [](const ContentRun& run) {
         const at::Tensor output = run.forward(run.data), sums = output.detach().sum(0);
         run.trace.push_back(sums.max().item<double>());
         run.trace.push_back(sums[1].item<double>());
         sums.slice(0, 1, 3).zero_();
         run.trace.push_back(sums.cpu().data_ptr<float>()[1]);
         sums[1] += 3;
         run.trace.push_back(sums[1].item<double>());
         return run.trained((output * sums).square().mean());
       }},
      {"IsThatOfItsWay",
       [](const ContentRun& run) {
         const at::Tensor output = run.forward(run.data);
         at::Tensor loss = output.square().mean();
         if (run.step % 3 > 0) run.trace.push_back(loss.item<double>());
         loss += output.abs().mean();
         if (run.step % 3 < 2) run.trace.push_back(loss.item<double>());
         return run.trained(run.step % 2 == 0 ? loss : loss * 2);
       }},
      {"OfABufferIsThatOfTheMicrobatch",
       [](const ContentRun& run) {
         run.trace.push_back(run.net.count[0].item<double>());
         run.net.count.add_(1);
         run.trace.push_back(run.net.count[1].item<double>());
         const at::Tensor output = run.forward(run.data);
         run.net.count[1] += 2;
         run.trace.push_back(run.net.count.sum().item<double>());
         run.trace.push_back(run.net.count.cpu().data_ptr<float>()[1]);
         return run.trained((output * run.net.scale).square().mean());
       }},
      {"OfAParameterBeforeItsFirstUse",
       [](const ContentRun& run) {
         run.trace.push_back(run.net.scale.item<double>());
         const at::Tensor output = run.forward(run.data);
         const at::Tensor loss = (output * run.net.scale).square().mean();
         run.trace.push_back(run.net.scale.item<double>());
         return run.trained(loss);
       }},
      // Its gradient of many numbers is that of the rank which trains it, added up as in a loop.
      {"OfALargerParameterBeforeItsFirstUse",
       [](const ContentRun& run) {
         run.trace.push_back(run.net.fourth->weight.sum().item<double>());
         return run.trained((run.forward(run.data) * run.net.scale).square().mean());
       }},
      {"OfAParameterAndABufferAfterOtherReads",
       [](const ContentRun& run) {
         const at::Tensor output = run.forward(run.data);
         run.trace.push_back(output.sum().item<double>());
         run.trace.push_back(run.net.scale.item<double>());
         if (run.step == 2) run.trace.push_back(run.net.count.sum().item<double>());
         return run.trained((output * run.net.scale).square().mean());
       }},
      {"OfAParameterOnSomeWaysOnly",
       [](const ContentRun& run) {
         if (run.step % 2 == 1) run.trace.push_back(run.net.scale.item<double>());
         const at::Tensor output = run.forward(run.data);
         return run.trained(run.step == 3 ? output.abs().mean() : (output * run.net.scale).square().mean());
       }},
      // What is run for it is not under the autocast of the place that asks.
      {"WithinAutocastOnly",
       [](const ContentRun& run) {
         const c10::DeviceType device = runtime::this_ranks_device().type;
         const at::Tensor output = run.forward(run.data);
         at::autocast::set_autocast_enabled(device, true);
         run.trace.push_back(output.sum().item<double>());
         run.trace.push_back(output.cpu().data_ptr<float>()[1]);
         at::autocast::clear_cache();
         at::autocast::set_autocast_enabled(device, false);
         return run.trained(output.square().mean());
       }},
      {"TwiceOnTheCpuAreTwoTensors",
       [](const ContentRun& run) {
         const at::Tensor output = run.forward(run.data), first = (output.detach() * 1).cpu();
         first.data_ptr<float>()[0] = 7;  // no operator reads it again
         run.trace.push_back((output.detach() * 1).cpu().data_ptr<float>()[0]);
         return run.trained(output.square().mean());
       }},
      {"OnTheCpuOfAnotherTypeKeepsItsGradient",
       [](const ContentRun& run) {
         const at::Tensor here = run.forward(run.data).cpu().to(at::kCPU, at::kDouble);
         run.trace.push_back(here.data_ptr<double>()[0]);
         return run.trained(here.square().mean());
       }},
      {"FirstWithoutGradients",
       [](const ContentRun& run) {
         const at::Tensor output = run.forward(run.data);
         {
           const at::NoGradGuard no_grad;
           run.trace.push_back(output.cpu().sum().item<double>());
           run.trace.push_back(output.to(at::kFloat).sum().item<double>());
         }
         return run.trained(output.square().mean());
       }},
      {"FirstInInferenceMode",
       [](const ContentRun& run) {
         const at::Tensor output = run.forward(run.data);
         {
           const c10::InferenceMode inference;
           run.trace.push_back(output.sum().item<double>());
           run.trace.push_back((output * 2).cpu().sum().item<double>());
         }
         return run.trained(output.square().mean());
       }},
      {"OfTheLossWithoutGradients",
       [](const ContentRun& run) {
         const at::Tensor loss = run.forward(run.data).square().mean();
         {
           const at::NoGradGuard no_grad;
           run.trace.push_back(loss.cpu().item<double>());
         }
         return run.trained(loss);
       }},
      {"OnTheCpuRequiresAGradientAsInALoop",
       [](const ContentRun& run) {
         const at::Tensor output = run.forward(run.data), here = output.cpu(), twice = here * 2,
                          fixed = (here * 3).detach_();
         const at::Tensor others = torch::zeros_like(here);
         others.add_(1);
         run.trace.push_back(here.requires_grad() + 2 * twice.requires_grad() + 4 * twice[0].requires_grad());
         run.trace.push_back(fixed.requires_grad() + 2 * here.detach().requires_grad() + 4 * others.requires_grad());
         others.mul_(twice);
         run.trace.push_back(others.requires_grad());
         const at::NoGradGuard no_grad;
         run.trace.push_back((twice * 2).requires_grad() + 2 * twice.requires_grad());
         const at::AutoGradMode with_grad(true);
         return run.trained(((twice * fixed + others).square().mean()).to(output.device()));
       }},
      {"OnTheCpuMaySelectWithoutGradient",
       [](const ContentRun& run) {
         const at::Tensor output = run.forward(run.data), here = output.detach().cpu();
         return run.trained(output.square().mean() * here.masked_select(here > -1e3).sum());
       }},
  };
}

using ContentReads = tests::BodyTable<CountNet>;

TEST_P(ContentReads, AreThoseOfALoop) { expect_as_in_a_loop(); }

INSTANTIATE_TEST_SUITE_P(Bodies, ContentReads, testing::Combine(testing::ValuesIn(content_reads()), testing::Values(1, 2)),
                         tests::name_on_ranks<BodyCase<CountNet>>);

class ReadContent : public testing::TestWithParam<int> {};

/// Draws nothing, so that a body may read before it is known whether it trains.
struct DrawlessNet : tests::TwoLayers {
  at::Tensor count = register_buffer("count", torch::zeros({3}));
};

TEST_P(ReadContent, OfABufferOnTheCpuFollowsWrites) {
  expect_as_in_a_loop<DrawlessNet>({.ranks = GetParam()}, [](const BodyRun<DrawlessNet>& run) {
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
    return run.trained((run.forward(run.data) * here.sum()).square().mean());
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
    return run.trained(output.square().mean() * there.sum().to(run.data.device()));
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

INSTANTIATE_TEST_SUITE_P(Ranks, ReadContent, testing::Values(1, 2));

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

struct ContentRefusal {
  std::string name;
  std::function<at::Tensor(const at::Tensor& output)> loss_of;
  std::string text;

  friend void PrintTo(const ContentRefusal& row, std::ostream* out) { *out << row.name; }
};

std::vector<ContentRefusal> content_refusals() {
  const std::string functions = "in or after module 'fourth': expected gradient functions that operators have made";
  const auto marked = [](const at::Tensor& output) {
    const at::Tensor weights = output.detach().clone().cpu();
    weights.data_ptr<float>()[3] = 2;
    return weights;
  };
  return {
      {"DroppedIsNoLoss",
       [](const at::Tensor& output) {
         (void)output.sum().cpu();
         return at::Tensor();
       },
       "got an undefined tensor"},
      {"ToACustomFunction",
       [](const at::Tensor& output) { return Turned::apply(output.cpu(), false).mean().to(output.device()); }, functions},
      {"ToACustomFunctionThatWrites",
       [](const at::Tensor& output) { return Turned::apply(output.cpu() * 1, true).mean().to(output.device()); }, functions},
      {"ToACustomFunctionWhoseResultTheBodyDrops",
       [](const at::Tensor& output) {
         const at::Tensor copy = output.cpu().clone();
         Turned::apply(copy.narrow(0, 0, 1), true);
         return copy.mean().to(output.device());
       },
       functions},
      {"WhereItIsHooked",
       [](const at::Tensor& output) {
         const at::Tensor here = output.cpu();
         here.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
         return here.mean().to(output.device());
       },
       "expected gradient hooks on parameters only"},
      {"WhereItIsTrained",
       [](const at::Tensor& output) {
         return (output.detach().cpu().requires_grad_() * 2).to(output.device()).mean() + output.mean();
       },
       "of the step body that was made to require a gradient (requires_grad_)"},
      {"WhereAShapeWouldLoseTheGradient",
       [](const at::Tensor& output) {
         const at::Tensor each = output.square().mean(1).cpu();
         return each.mean() + each.masked_select(each > 0).sum();
       },
       "aten::masked_select, in or after module 'fourth': the shape of its result depends on data"},
      {"AfterAWriteThroughAPointer", [=](const at::Tensor& output) { return (output * marked(output)).square().mean(); },
       "aten::mul, in or after module 'fourth': expected tensors that the body has brought to the CPU to be written by "
       "operators only, got one of sizes [2, 4] that was written through a pointer."},
      {"WhereItIsCopiedAfterAWriteThroughAPointer",
       [=](const at::Tensor& output) {
         const at::Tensor copy = marked(output).to(output.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true);
         return (output * copy).square().mean();
       },
       "aten::to, in or after module 'fourth': expected tensors that the body has brought to the CPU to"},
  };
}

class ContentOnTheCpu : public testing::TestWithParam<std::tuple<ContentRefusal, int>> {};

TEST_P(ContentOnTheCpu, IsRefusedOnEveryRankAndNothingChanges) {
  const auto& [row, ranks] = GetParam();
  tests::Loop<SmallNet> loop{.ranks = ranks, .steps = 1, .config = {.microbatches = 2}};
  loop.refusal = [&row = row](int) { return tests::Texts{row.text}; };
  expect_as_in_a_loop<SmallNet>(
      loop, [&row = row](const BodyRun<SmallNet>& run) { return run.trained(row.loss_of(run.forward(run.data))); });
}

INSTANTIATE_TEST_SUITE_P(Bodies, ContentOnTheCpu,
                         testing::Combine(testing::ValuesIn(content_refusals()), testing::Values(1, 2)),
                         tests::name_on_ranks<ContentRefusal>);

}  // namespace
}  // namespace smp
