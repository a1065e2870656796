// What a later run of a body may change without being taken for the recorded one.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>

#include <array>

#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using tests::BodyCase;
using tests::BodyRun;
using tests::make_net;
using tests::MicrobatchRun;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;

/// Two steps, of which the second differs from the recording.
std::vector<BodyCase<SmallNet>> changes() {
  return {
      {"ADetachedTensorInPlaceOfTheTensorStopsItsGradient",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data), detached = output.detach();
         return run.trained((run.step == 1 ? detached : output).square().sum() + output.sum() * 1e-3);
       },
       2},
      {"ACopyBehindTheDispatcherInPlaceOfTheTensorStopsItsGradient",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data);
         return run.trained((run.step == 1 ? at::Tensor(output.data()) : output).square().sum() + output.sum() * 1e-3);
       },
       2},
      {"ATensorInPlaceOfItsDetachedOneGetsItsGradient",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data), detached = output.detach();
         return run.trained((run.step == 0 ? detached : output).square().sum() + output.sum() * 1e-3);
       },
       2},
      // With p = 0 dropout returns its argument itself.
      {"ADropoutThatBeginsToDropLeavesItsArgumentAlone",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data);
         return run.trained((torch::dropout(output, run.step, true) * 2 + output).square().sum());
       },
       2},
      {"ADropoutThatEndsDroppingReturnsItsArgument",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data) * 1;
         torch::dropout(output, 1 - run.step, true).mul_(2);
         return run.trained((output * 3).sum());
       },
       2},
      {"AnotherLossForTheBackwardIsHonoured",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data), one = output.sum(), two = output.square().sum();
         run.backward(run.step == 1 ? two : one);
         return output;
       },
       2},
  };
}

using Rematch = tests::BodyTable<SmallNet>;

TEST_P(Rematch, TrainsAsInALoop) { expect_as_in_a_loop(); }

INSTANTIATE_TEST_SUITE_P(Changes, Rematch, testing::Combine(testing::ValuesIn(changes()), testing::Values(1)),
                         tests::name_on_ranks<BodyCase<SmallNet>>);

class Freezing : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Freezing, BetweenStepsChangesWhoGetsGradients) {
  const auto [ranks, at_first] = GetParam();
  tests::Loop<SmallNet> loop{.ranks = ranks, .steps = 3, .config = {.microbatches = 2}};
  loop.make = [] {
    const auto net = make_net();
    int i = 0;
    for (const auto& layer : {net->first, net->second, net->third, net->fourth}) set_partition(*layer, i++ * pp_size() / 4);
    return net;
  };
  loop.before_step = [at_first = at_first](SmallNet& net, int step) {
    const bool frozen = at_first == (step % 2 == 0);
    for (const auto& item : net.named_parameters()) {
      item.value().mutable_grad().reset();
      if (item.key().starts_with("first") || item.key().starts_with("second")) item.value().set_requires_grad(!frozen);
    }
  };
  tests::expect_as_in_a_loop<SmallNet>(loop, tests::train_once);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Freezing, testing::Combine(testing::Values(1, 2), testing::Bool()));

TEST(Rematch, AParameterOfAnotherTypeIsRecordedAnew) {
  run_smp_ranks(1, {.microbatches = 1}, [] {
    Model model(make_net());
    auto step = smp::step([&](at::Tensor) { return model.module()->fourth->bias * 3; });
    const at::NoGradGuard no_grad;
    EXPECT_EQ(step(rows(2, 8, 1))[0].scalar_type(), at::kFloat);
    at::Tensor bias = model.module()->fourth->bias;
    bias.set_data(bias.to(at::kDouble));
    EXPECT_EQ(step(rows(2, 8, 1))[0].scalar_type(), at::kDouble);
  });
}

TEST(ListWrites, LeaveTheCallersTensorAlone) {
  run_smp_ranks(1, {.microbatches = 2}, [] {
    Model model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      at::_foreach_mul_({data}, 2.0);
      return data.sum();
    });
    const at::NoGradGuard no_grad;
    const at::Tensor data = rows(16, 16, 1), before = data.clone();
    for (int s = 0; s < 2; ++s) {
      expect_bit_equal(step(data)[0], (before.narrow(0, 0, 8) * 2).sum(), "doubled");
      expect_bit_equal(data, before, "argument");
    }
  });
}

TEST(ForeignMemory, AConstantOnALocalVectorIsCopiedWhenItIsUsed) {
  run_smp_ranks(1, {.microbatches = 2}, [] {
    Model model(make_net());
    float factor = 0.5;
    auto step = smp::step([&](at::Tensor data) {
      at::Tensor result;
      {
        std::vector<float> local(8, factor);
        result = data * torch::from_blob(local.data(), {8});
        factor += 1;
        std::fill(local.begin(), local.end(), -1.f);  // as memory that was freed and given away
      }
      return result;
    });
    const at::NoGradGuard no_grad;
    const at::Tensor data = rows(4, 8, 1);
    for (int s = 0; s < 2; ++s) {
      const StepOutput output = step(data);
      for (int m = 0; m < 2; ++m) {
        expect_bit_equal(output[m], data.chunk(2)[m] * (0.5 + 2 * s + m), "step " + std::to_string(s));
      }
    }
  });
}

TEST(Rematch, AHookThatTheBodyTakesAwayIsRefused) {
  run_smp_ranks(1, {.microbatches = 1}, [&] {
    const auto net = make_net();
    const auto hook = net->fourth->weight.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    Model model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).sum();
      model.backward(loss);
      net->fourth->weight.remove_hook(hook);
      return loss;
    });
    EXPECT_THROW(step(rows(4, 8, 1)), c10::NotImplementedError);
  });
}

struct ForbiddenChange {
  std::string name;
  std::function<at::Tensor(const BodyRun<SmallNet>&, bool bad)> body;
  std::string text;

  friend void PrintTo(const ForbiddenChange& row, std::ostream* out) { *out << row.name; }
};

ForbiddenChange written_constant(const std::string& name, void (*write)(at::Tensor& table)) {
  const auto body = [write, table = torch::zeros({2, 4})](const BodyRun<SmallNet>& run, bool bad) mutable {
    const at::Tensor output = run.forward(run.data) + table;
    if (bad) write(table);
    return output;
  };
  return {name, body, "writes to a tensor of sizes [2, 4] that is neither"};
}

std::vector<ForbiddenChange> forbidden_changes() {
  return {
      {"DivisionOfTheLossAfterItsBackward",
       [](const BodyRun<SmallNet>& run, bool bad) {
         at::Tensor loss = run.forward(run.data).sum();
         if (bad) run.backward(loss);
         loss /= 4;
         if (!bad) run.backward(loss);
         return loss;
       },
       "expected operators after backward() to leave the loss as it is, got aten::div_"},
      {"DivisionThroughAViewAfterTheBackward",
       [](const BodyRun<SmallNet>& run, bool bad) {
         at::Tensor loss = run.forward(run.data).sum(), flat = loss.view({1});
         if (bad) run.backward(loss);
         flat /= 4;
         if (!bad) run.backward(loss);
         return loss;
       },
       "leave the loss as it is"},
      {"DetachingTheLossInPlaceAfterItsBackward",
       [](const BodyRun<SmallNet>& run, bool bad) {
         at::Tensor loss = run.forward(run.data).sum();
         run.backward(loss);
         if (bad) loss.detach_();
         return loss;
       },
       "leave the loss as it is, got aten::detach_"},
      {"ListWritesOfGradientsIntoData",
       [](const BodyRun<SmallNet>& run, bool bad) {
         if (bad) at::_foreach_mul_({run.data}, at::TensorList(run.net.first->bias));
         return run.forward(run.data);
       },
       "expected aten::_foreach_mul_ to write no gradients"},
      {"FreezingAndThawingInsideTheBody",
       [](const BodyRun<SmallNet>& run, bool bad) {
         at::Tensor weight = run.net.fourth->weight;
         if (bad) weight.set_requires_grad(false);
         const at::Tensor output = run.forward(run.data);
         weight.set_requires_grad(true);
         return output;
       },
       "expected 'fourth.weight' to keep requires_grad=false"},
      // Where no use of the weight in the body sees both.
      {"FreezingFromThisMicrobatchOn",
       [](const BodyRun<SmallNet>& run, bool bad) {
         run.net.fourth->weight.set_requires_grad(!bad);
         return run.forward(run.data);
       },
       "expected 'fourth.weight' to keep requires_grad=true"},
      {"HookingAParameterForABackward",
       [](const BodyRun<SmallNet>& run, bool bad) {
         const at::Tensor loss = run.forward(run.data).sum(), weight = run.net.fourth->weight;
         const auto hook = bad ? weight.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; }) : 0;
         run.backward(loss);
         if (bad) weight.remove_hook(hook);
         return loss;
       },
       "leave the gradient hooks of 'fourth.weight' as they are"},
      {"ListWritesToAConstant",
       [calls = torch::zeros({1})](const BodyRun<SmallNet>& run, bool bad) {
         if (bad) at::_foreach_add_({calls}, 1.0);
         return run.forward(run.data);
       },
       "aten::_foreach_add_ writes to a tensor of sizes [1] that is neither"},
      written_constant("WriteToARowOfAConstant", [](at::Tensor& table) { table[0] = 2; }),
      written_constant("WriteToASliceOfAConstant", [](at::Tensor& table) { table.slice(0, 0, 2).add_(1); }),
      written_constant("WriteToADetachedConstant", [](at::Tensor& table) { table.detach().add_(1); }),
      written_constant("WriteToAConstantOnTheCpu", [](at::Tensor& table) { table.cpu().add_(1); }),
      {"RewritingForeignMemoryBetweenTwoUses",
       [numbers = std::array{1.0F, 2.0F}](const BodyRun<SmallNet>& run, bool bad) mutable {
         const at::Tensor constant = torch::from_blob(numbers.data(), {2}), sum = run.forward(run.data).sum() * constant;
         if (bad) numbers[0] += 1;
         return sum * constant;
       },
       "was rewritten after its first use"},
  };
}

class RefusedChange : public testing::TestWithParam<std::tuple<ForbiddenChange, bool>> {};

TEST_P(RefusedChange, IsNoticedAtFirstAndAgainstARecording) {
  const auto& [row, is_second_run] = GetParam();
  const int bad_step = is_second_run ? 1 : 0;
  tests::Loop<SmallNet> loop{.steps = bad_step + 1, .config = {.microbatches = 1}};
  loop.refusal = [&, &row = row](int step) { return step == bad_step ? tests::Texts{row.text} : tests::Texts(); };
  tests::expect_as_in_a_loop<SmallNet>(
      loop, [&, &row = row](const BodyRun<SmallNet>& run) { return row.body(run, run.step == bad_step); });
}

INSTANTIATE_TEST_SUITE_P(Runs, RefusedChange, testing::Combine(testing::ValuesIn(forbidden_changes()), testing::Bool()),
                         [](const auto& test) {
                           const char* when = std::get<bool>(test.param) ? "_against_a_recording" : "_at_first";
                           return std::get<0>(test.param).name + when;
                         });

}  // namespace
}  // namespace smp
