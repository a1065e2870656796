// torch:: factories in step bodies: what is written into their results, and bodies that differ from the recording there.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyCase;
using tests::MicrobatchRun;
using tests::SmallNet;

BodyCase<SmallNet> written_by(const std::string& name, at::Tensor (*write)(const at::Tensor&)) {
  return {"AreWrittenToBy" + name,
          [write](const MicrobatchRun& run) {
            const at::Tensor output = run.forward(run.data), written = write(output);
            return run.trained(written.square().mean() + output.abs().mean());
          },
          2};
}

// Three ways, taken in turn, so that runs switch between recordings and go back from each.
BodyCase<SmallNet> written_on_some_ways(const std::string& name, at::Tensor (*make)()) {
  return {name + "AreWrittenToOnSomeWaysOnly",
          [make](const MicrobatchRun& run) {
            const at::Tensor output = run.forward(run.data), sum = make();
            if (run.step % 3 == 0) return run.trained((output * 2 + sum).square().mean());
            if (run.step % 3 == 2) return run.trained((output.exp() + sum).square().mean());
            sum.add_(output);
            return run.trained(sum.square().mean() + output.abs().mean());
          },
          9};
}

at::Tensor written_in_halves(const at::Tensor& y) {
  const at::Tensor all = torch::zeros({2, 8});
  all.slice(1, 0, 4).copy_(y);
  all.slice(1, 4, 8).copy_(y * 2);
  return all;
}

at::Tensor put_by_index(const at::Tensor& y) {
  at::Tensor some = torch::zeros({2, 4});
  return some.index_put_({torch::tensor({0, 1}), torch::tensor({1, 2})}, y.select(1, 0));
}

std::vector<BodyCase<SmallNet>> factories() {
  const auto scattered = [](const at::Tensor& y) {
    return torch::zeros({2, 4}).scatter_add_(1, torch::zeros({2, 4}, torch::kLong), y);
  };
  return {
      written_by("ASum", [](const at::Tensor& y) { return torch::zeros({2, 4}).add_(y); }),
      written_by("ACopy", [](const at::Tensor& y) { return torch::empty({2, 4}).copy_(y); }),
      written_by("AProduct", [](const at::Tensor& y) { return torch::ones_like(y).mul_(y); }),
      written_by("AScatteredSum", scattered),
      written_by("AProductOfTheTransposed", [](const at::Tensor& y) { return torch::ones({4, 2}).t_().mul_(y); }),
      written_by("CopiesToViews", written_in_halves),
      written_by("AnIndex", put_by_index),
      written_by("ASumThatIsDetached",
                 [](const at::Tensor& y) { return torch::zeros({2, 4}).add_(y).detach_().add_(y * 2); }),
      written_on_some_ways("OfTorch", [] { return torch::zeros({2, 4}); }),
      written_on_some_ways("OfAten", [] { return at::zeros({2, 4}); }),
      {"ThatAppearFromTheSecondStepOnKeepTheGradientsBefore",
       [](const MicrobatchRun& run) {
         at::Tensor output = run.forward(run.data);
         if (run.step > 0) output = output * torch::full({4}, 0.5);
         return run.trained(output.square().mean());
       }},
      {"OfAnotherSizeKeepTheGradientsBefore",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data);
         return run.trained((output * torch::arange(0, 4 + 4 * run.step, 1 + run.step)).square().mean());
       }},
      {"MarkClasses",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data), here = torch::one_hot(output.detach().argmax(1), 4);
         const at::Tensor halves = torch::one_hot((output.detach() > 0).to(torch::kLong).t(), 2 + run.step / 2);
         return run.trained((output * here).square().mean() + halves.select(2, 1).sum());
       }},
      {"CollectTheLoss",
       [](const MicrobatchRun& run) {
         at::Tensor loss = torch::zeros({});
         for (const at::Tensor& part : run.forward(run.data).unbind(1)) loss += part.square().mean();
         return run.trained(loss);
       }},
      {"CollectAPartOfTheLoss",
       [](const MicrobatchRun& run) {
         at::Tensor sum = torch::zeros({1});
         const at::Tensor output = run.forward(run.data);
         for (const at::Tensor& part : output.unbind(1)) sum += part.square().mean();
         return run.trained(sum.sum() + 1e-3 * output.sum());
       }},
      {"RequireAGradientFromTheWriteOn",
       [](const MicrobatchRun& run) {
         const at::Tensor sum = torch::zeros({2, 4}), same = at::zeros({2, 4});
         run.trace.push_back(sum.requires_grad() + 2 * same.requires_grad());
         const at::Tensor output = run.forward(run.data);
         sum.add_(output);
         same.add_(output);
         run.trace.push_back(sum.requires_grad() + 2 * same.requires_grad());
         return run.trained(sum.square().mean() + same.abs().mean());
       }},
      {"AreTheLossOnSomeWaysOnly",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data);
         at::Tensor loss = torch::zeros({});
         if (run.step % 3 == 0) return run.trained(output.square().mean() + loss);
         loss += output.abs().mean();
         if (run.step % 3 == 1) loss += output.exp().mean();
         return run.trained(loss);
       },
       9},
      {"AreReshapedInPlaceOnSomeWaysOnly",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data), factors = torch::ones({4, 2});
         if (run.step % 2 == 0) return run.trained(output.matmul(factors).square().mean());
         factors.t_();
         run.trace.push_back(static_cast<double>(factors.size(0)));
         return run.trained((factors * output).square().mean());
       },
       6},
  };
}

using Factories = tests::BodyTable<SmallNet>;

TEST_P(Factories, TrainAsInALoop) { expect_as_in_a_loop(); }

INSTANTIATE_TEST_SUITE_P(Bodies, Factories, testing::Combine(testing::ValuesIn(factories()), testing::Values(1, 2)),
                         tests::name_on_ranks<BodyCase<SmallNet>>);

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
