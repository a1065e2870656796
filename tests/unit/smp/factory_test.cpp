// torch:: factories in step bodies: what is written into their results, and bodies that differ from the recording there.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyRun;
using tests::expect_as_in_a_loop;
using tests::SmallNet;
using Body = BodyRun<SmallNet>;

class Factories : public testing::TestWithParam<int> {
 protected:
  static void check(const tests::LoopBody<SmallNet>& body, int steps = 4) {
    expect_as_in_a_loop<SmallNet>({.ranks = GetParam(), .steps = steps}, body);
  }
  static at::Tensor trained(const Body& run, const at::Tensor& loss) {
    run.backward(loss);
    return loss;
  }
};

TEST_P(Factories, ThatAppearFromTheSecondStepOnKeepTheGradientsBefore) {
  check([](const Body& run) {
    at::Tensor output = run.forward(run.data);
    if (run.step > 0) output = output * torch::full({4}, 0.5);
    return trained(run, output.square().mean());
  });
}

TEST_P(Factories, OfAnotherSizeKeepTheGradientsBefore) {
  check([](const Body& run) {
    const at::Tensor output = run.forward(run.data);
    return trained(run, (output * torch::arange(0, 4 + 4 * run.step, 1 + run.step)).square().mean());
  });
}

TEST_P(Factories, MarkClasses) {
  check([](const Body& run) {
    const at::Tensor output = run.forward(run.data), here = torch::one_hot(output.detach().argmax(1), 4);
    const at::Tensor halves = torch::one_hot((output.detach() > 0).to(torch::kLong).t(), 2 + run.step / 2);
    return trained(run, (output * here).square().mean() + halves.select(2, 1).sum());
  });
}

TEST_P(Factories, CollectTheLoss) {
  check([](const Body& run) {
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& part : run.forward(run.data).unbind(1)) loss += part.square().mean();
    return trained(run, loss);
  });
}

TEST_P(Factories, CollectAPartOfTheLoss) {
  check([](const Body& run) {
    at::Tensor sum = torch::zeros({1});
    const at::Tensor output = run.forward(run.data);
    for (const at::Tensor& part : output.unbind(1)) sum += part.square().mean();
    return trained(run, sum.sum() + 1e-3 * output.sum());
  });
}

TEST_P(Factories, AreWrittenToByAnyOperator) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> writes = {
      [](const at::Tensor& y) { return torch::zeros({2, 4}).add_(y); },
      [](const at::Tensor& y) { return torch::empty({2, 4}).copy_(y); },
      [](const at::Tensor& y) { return torch::ones_like(y).mul_(y); },
      [](const at::Tensor& y) { return torch::zeros({2, 4}).scatter_add_(1, torch::zeros({2, 4}, torch::kLong), y); },
      [](const at::Tensor& y) { return torch::ones({4, 2}).t_().mul_(y); },
      [](const at::Tensor& y) {
        const at::Tensor all = torch::zeros({2, 8});
        all.slice(1, 0, 4).copy_(y);
        all.slice(1, 4, 8).copy_(y * 2);
        return all;
      },
      [](const at::Tensor& y) {
        at::Tensor some = torch::zeros({2, 4});
        return some.index_put_({torch::tensor({0, 1}), torch::tensor({1, 2})}, y.select(1, 0));
      },
      [](const at::Tensor& y) { return torch::zeros({2, 4}).add_(y).detach_().add_(y * 2); },
  };
  for (const auto& write : writes) {
    check(
        [&](const Body& run) {
          const at::Tensor output = run.forward(run.data), written = write(output);
          return trained(run, written.square().mean() + output.abs().mean());
        },
        2);
  }
}

TEST_P(Factories, RequireAGradientFromTheWriteOn) {
  check([](const Body& run) {
    const at::Tensor sum = torch::zeros({2, 4}), same = at::zeros({2, 4});
    run.trace.push_back(sum.requires_grad() + 2 * same.requires_grad());
    const at::Tensor output = run.forward(run.data);
    sum.add_(output);
    same.add_(output);
    run.trace.push_back(sum.requires_grad() + 2 * same.requires_grad());
    return trained(run, sum.square().mean() + same.abs().mean());
  });
}

// Three ways, taken in turn, so that runs switch between recordings and go back from each.
TEST_P(Factories, AreWrittenToOnSomeWaysOnly) {
  for (const auto& make : {+[] { return torch::zeros({2, 4}); }, +[] { return at::zeros({2, 4}); }}) {
    check(
        [&](const Body& run) {
          const at::Tensor output = run.forward(run.data), sum = make();
          at::Tensor loss;
          if (run.step % 3 == 0) {
            loss = (output * 2 + sum).square().mean();
          } else if (run.step % 3 == 1) {
            sum.add_(output);
            loss = sum.square().mean() + output.abs().mean();
          } else {
            loss = (output.exp() + sum).square().mean();
          }
          return trained(run, loss);
        },
        9);
  }
}

TEST_P(Factories, AreTheLossOnSomeWaysOnly) {
  check(
      [](const Body& run) {
        const at::Tensor output = run.forward(run.data);
        at::Tensor loss = torch::zeros({});
        if (run.step % 3 == 0) return trained(run, output.square().mean() + loss);
        loss += output.abs().mean();
        if (run.step % 3 == 1) loss += output.exp().mean();
        return trained(run, loss);
      },
      9);
}

TEST_P(Factories, AreReshapedInPlaceOnSomeWaysOnly) {
  check(
      [](const Body& run) {
        const at::Tensor output = run.forward(run.data), factors = torch::ones({4, 2});
        if (run.step % 2 == 0) return trained(run, output.matmul(factors).square().mean());
        factors.t_();
        run.trace.push_back(static_cast<double>(factors.size(0)));
        return trained(run, (factors * output).square().mean());
      },
      6);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Factories, testing::Values(1, 2));

TEST(FactoriesOfAnEarlierRun, AreNotTakenForThoseOfThisRun) {
  tests::run_smp_ranks(1, {.microbatches = 1}, [] {
    DistributedModel model(tests::make_net());
    at::Tensor kept;
    int s = 0;
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor now = torch::ones({4}), output = model(data);
      const at::Tensor loss = (output * (s == 3 ? kept : now)).square().mean();
      model.backward(loss);
      kept = now;
      return loss;
    });
    for (; s < 3; ++s) step(tests::rows(2, 8, 1));
    EXPECT_THROW(step(tests::rows(2, 8, 1)), c10::Error);
  });
}

}  // namespace
}  // namespace smp
