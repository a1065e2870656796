// What a later run of a body may change without being taken for the recorded one.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <gtest/gtest.h>

#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using tests::expect_twins;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;

const std::vector<std::string> kModules = {"first", "second", "third", "fourth"};

/// Both take the body on some module that is called like a function; `loss` of one microbatch, backward included.
using Loss = std::function<at::Tensor(const std::function<at::Tensor(at::Tensor)>& net, at::Tensor data)>;

/// Two steps, `change` between them; the gradients of each equal those of the module itself.
void expect_as_eager(const Loss& loss, const std::function<void()>& change) {
  run_smp_ranks(1, {.microbatches = 2}, [&] {
    auto twin = make_net();
    Model model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor value = loss([&](const at::Tensor& x) { return model(x); }, data);
      model.backward(value);
      return value;
    });
    const at::Tensor data = rows(4, 8, 1);
    for (int s = 0; s < 2; ++s) {
      if (s == 1) change();
      model.zero_grad();
      twin->zero_grad();
      const StepOutput losses = step(data);
      for (int m = 0; m < 2; ++m) {
        const at::Tensor value = loss([&](const at::Tensor& x) { return twin->forward(x); }, data.chunk(2)[m]);
        (value / 2).backward();
        expect_bit_equal(losses[m], value.detach(), "loss of step " + std::to_string(s));
      }
      expect_twins(model, *twin, "step " + std::to_string(s));
    }
  });
}

TEST(Rematch, ADetachedTensorInPlaceOfTheTensorStopsItsGradient) {
  bool stop = false;
  expect_as_eager(
      [&](const auto& net, const at::Tensor& data) {
        const at::Tensor output = net(data), detached = output.detach();
        return (stop ? detached : output).square().sum() + output.sum() * 1e-3;
      },
      [&] { stop = true; });
}

TEST(Rematch, ACopyBehindTheDispatcherInPlaceOfTheTensorStopsItsGradient) {
  bool stop = false;
  expect_as_eager(
      [&](const auto& net, const at::Tensor& data) {
        const at::Tensor output = net(data);
        return (stop ? at::Tensor(output.data()) : output).square().sum() + output.sum() * 1e-3;
      },
      [&] { stop = true; });
}

TEST(Rematch, ATensorInPlaceOfItsDetachedOneGetsItsGradient) {
  bool stop = true;
  expect_as_eager(
      [&](const auto& net, const at::Tensor& data) {
        const at::Tensor output = net(data), detached = output.detach();
        return (stop ? detached : output).square().sum() + output.sum() * 1e-3;
      },
      [&] { stop = false; });
}

// With p = 0 dropout returns its argument itself.
TEST(Rematch, ADropoutThatBeginsToDropLeavesItsArgumentAlone) {
  double p = 0;
  expect_as_eager(
      [&](const auto& net, const at::Tensor& data) {
        const at::Tensor output = net(data);
        return (torch::dropout(output, p, true) * 2 + output).square().sum();
      },
      [&] { p = 1; });
}

TEST(Rematch, ADropoutThatEndsDroppingReturnsItsArgument) {
  double p = 1;
  expect_as_eager(
      [&](const auto& net, const at::Tensor& data) {
        const at::Tensor output = net(data) * 1;
        torch::dropout(output, p, true).mul_(2);
        return (output * 3).sum();
      },
      [&] { p = 0; });
}

TEST(Rematch, AnotherLossForTheBackwardIsHonoured) {
  bool second = false;
  run_smp_ranks(1, {.microbatches = 1}, [&] {
    auto twin = make_net();
    Model model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor output = model(data), one = output.sum(), two = output.square().sum();
      model.backward(second ? two : one);
      return output;
    });
    const at::Tensor data = rows(4, 8, 1);
    step(data);
    model.zero_grad();
    second = true;
    step(data);
    twin->forward(data).square().sum().backward();
    expect_twins(model, *twin, "second loss");
  });
}

void freeze(torch::nn::Module& net, bool frozen) {
  for (const auto& item : net.named_parameters()) {
    const bool early = item.key().starts_with("first") || item.key().starts_with("second");
    if (early) item.value().set_requires_grad(!frozen);
  }
}

class Freezing : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Freezing, BetweenStepsChangesWhoGetsGradients) {
  const auto [ranks, at_first] = GetParam();
  run_smp_ranks(ranks, {.microbatches = 2}, [&, at_first = at_first, ranks = ranks] {
    auto net = make_net(), twin = make_net();
    Model model(net);
    for (size_t i = 0; i < kModules.size(); ++i) {
      set_partition(*net->named_children()[kModules[i]], static_cast<int>(i) * ranks / 4);
    }
    auto step = tests::training_step(model);
    const at::Tensor data = rows(4, 8, 1), target = rows(4, 4, 2);
    for (const bool frozen : {at_first, !at_first, at_first}) {
      freeze(*net, frozen);
      freeze(*twin, frozen);
      for (auto* module : std::initializer_list<torch::nn::Module*>{net.get(), twin.get()}) {
        for (at::Tensor& parameter : module->parameters()) parameter.mutable_grad().reset();
      }
      step(data, target);
      tests::eager_step(*twin, data, target, 2);
      for (const auto& [name, parameter] : model.local_named_parameters()) {
        const at::Tensor expected = twin->named_parameters()[name].grad();
        ASSERT_EQ(parameter.grad().defined(), expected.defined()) << name << " frozen " << frozen;
        if (expected.defined()) expect_bit_equal(parameter.grad(), expected, name);
      }
    }
  });
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

/// The text of the refusal of `body`, run after a step with `matched` and without.
std::string refusal_of(const std::function<at::Tensor(Model&, at::Tensor, bool)>& body, bool is_second_run) {
  std::string text;
  run_smp_ranks(1, {.microbatches = 1}, [&] {
    Model model(make_net());
    bool bad = !is_second_run;
    auto step = smp::step([&](at::Tensor data) { return body(model, data, bad); });
    try {
      step(rows(4, 8, 1));
      bad = true;
      step(rows(4, 8, 1));
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
  });
  return text;
}

class RefusedChange : public testing::TestWithParam<bool> {};

TEST_P(RefusedChange, DivisionOfTheLossAfterItsBackward) {
  const std::string text = refusal_of(
      [](Model& model, const at::Tensor& data, bool bad) {
        at::Tensor loss = model(data).sum();
        if (bad) model.backward(loss);
        loss /= 4;
        if (!bad) model.backward(loss);
        return loss;
      },
      GetParam());
  EXPECT_NE(text.find("expected operators after backward() to leave the loss as it is, got aten::div_"), std::string::npos)
      << text;
}

TEST_P(RefusedChange, DivisionThroughAViewAfterTheBackward) {
  const std::string text = refusal_of(
      [](Model& model, const at::Tensor& data, bool bad) {
        at::Tensor loss = model(data).sum(), flat = loss.view({1});
        if (bad) model.backward(loss);
        flat /= 4;
        if (!bad) model.backward(loss);
        return loss;
      },
      GetParam());
  EXPECT_NE(text.find("leave the loss as it is"), std::string::npos) << text;
}

TEST_P(RefusedChange, DetachingTheLossInPlaceAfterItsBackward) {
  const std::string text = refusal_of(
      [](Model& model, const at::Tensor& data, bool bad) {
        at::Tensor loss = model(data).sum();
        model.backward(loss);
        if (bad) loss.detach_();
        return loss;
      },
      GetParam());
  EXPECT_NE(text.find("leave the loss as it is, got aten::detach_"), std::string::npos) << text;
}

TEST_P(RefusedChange, ListWritesToAConstant) {
  at::Tensor calls = torch::zeros({1});
  const std::string text = refusal_of(
      [&](Model& model, const at::Tensor& data, bool bad) {
        if (bad) at::_foreach_add_({calls}, 1.0);
        return model(data);
      },
      GetParam());
  EXPECT_NE(text.find("aten::_foreach_add_ writes to a tensor of sizes [1] that is neither"), std::string::npos) << text;
}

TEST_P(RefusedChange, WritesToViewsOfAConstant) {
  at::Tensor table = torch::zeros({4, 4});
  const std::vector<std::function<void()>> writes = {[&] { table[0] = 2; }, [&] { table.slice(0, 0, 2).add_(1); },
                                                     [&] { table.detach().add_(1); }, [&] { table.cpu().add_(1); }};
  for (size_t n = 0; n < writes.size(); ++n) {
    const std::string text = refusal_of(
        [&](Model& model, const at::Tensor& data, bool bad) {
          const at::Tensor output = model(data) + table;
          if (bad) writes[n]();
          return output;
        },
        GetParam());
    EXPECT_NE(text.find("writes to a tensor of sizes [4, 4] that is neither"), std::string::npos)
        << "form " << n << ": " << text;
  }
}

TEST_P(RefusedChange, ListWritesOfGradientsIntoData) {
  const std::string text = refusal_of(
      [&](Model& model, const at::Tensor& data, bool bad) {
        if (bad) at::_foreach_mul_({data}, at::TensorList(model.module()->first->bias));
        return model(data);
      },
      GetParam());
  EXPECT_NE(text.find("expected aten::_foreach_mul_ to write no gradients"), std::string::npos) << text;
}

TEST_P(RefusedChange, FreezingAndThawingInsideTheBody) {
  const std::string text = refusal_of(
      [&](Model& model, const at::Tensor& data, bool bad) {
        at::Tensor weight = model.module()->fourth->weight;
        if (bad) weight.set_requires_grad(false);
        const at::Tensor output = model(data);
        weight.set_requires_grad(true);
        return output;
      },
      GetParam());
  EXPECT_NE(text.find("expected 'fourth.weight' to keep requires_grad=false"), std::string::npos) << text;
}

// Where no use of the weight in the body sees both.
TEST_P(RefusedChange, FreezingFromThisMicrobatchOn) {
  const std::string text = refusal_of(
      [&](Model& model, const at::Tensor& data, bool bad) {
        model.module()->fourth->weight.set_requires_grad(!bad);
        return model(data);
      },
      GetParam());
  EXPECT_NE(text.find("expected 'fourth.weight' to keep requires_grad=true"), std::string::npos) << text;
}

TEST_P(RefusedChange, HookingAParameterForABackward) {
  const std::string text = refusal_of(
      [&](Model& model, const at::Tensor& data, bool bad) {
        const at::Tensor loss = model(data).sum(), weight = model.module()->fourth->weight;
        const auto hook = bad ? weight.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; }) : 0;
        model.backward(loss);
        if (bad) weight.remove_hook(hook);
        return loss;
      },
      GetParam());
  EXPECT_NE(text.find("leave the gradient hooks of 'fourth.weight' as they are"), std::string::npos) << text;
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

TEST_P(RefusedChange, RewritingForeignMemoryBetweenTwoUses) {
  float numbers[] = {1, 2};
  const std::string text = refusal_of(
      [&](Model& model, const at::Tensor& data, bool bad) {
        const at::Tensor constant = torch::from_blob(numbers, {2});
        at::Tensor sum = model(data).sum() * constant;
        if (bad) numbers[0] += 1;
        return sum * constant;
      },
      GetParam());
  EXPECT_NE(text.find("was rewritten after its first use"), std::string::npos) << text;
}

INSTANTIATE_TEST_SUITE_P(Runs, RefusedChange, testing::Bool(),
                         [](const auto& test) { return test.param ? "AgainstARecording" : "AtFirst"; });

}  // namespace
}  // namespace smp
