// What a step refuses: on every rank, with one text, and nothing of the model changed.
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using tests::make_net;
using tests::rows;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;

struct Refusal {
  std::string name;
  std::function<at::Tensor(Model&, at::Tensor data, at::Tensor target)> body;
  std::vector<std::string> texts;  // all in the message
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * 2};
  }
};

at::Tensor in_another_thread(const std::function<at::Tensor()>& make) {
  at::Tensor made;
  std::thread([&] { made = make(); }).join();
  return made;
}

const std::string kFourth = "in or after module 'fourth'";

std::vector<Refusal> value_refusals() {
  return {
      {"Nonzero",
       [](Model& model, at::Tensor data, at::Tensor) { return model(data).nonzero().sum(); },
       {"aten::nonzero", kFourth, "depends on data"}},
      {"OneHotWithoutTheNumberOfClasses",
       [](Model& model, at::Tensor data, at::Tensor) { return torch::one_hot(model(data).argmax(1)).sum(); },
       {"aten::one_hot", kFourth, "depends on data"}},
      {"Unique",
       [](Model& model, at::Tensor data, at::Tensor) { return std::get<0>(torch::_unique(model(data))).sum(); },
       {"aten::_unique", kFourth, "depends on data"}},
      {"MetaDevice",
       [](Model& model, at::Tensor data, at::Tensor) { return model(data).to(torch::kMeta); },
       {"aten::to", kFourth, "got the meta device"}},
      {"DataOfMemoryReadAsAnotherDtype",
       [](Model& model, at::Tensor data, at::Tensor) { return (model(data) * 2).view(torch::kInt).data().sum(); },
       {kFourth, "got one of Int on memory of Float", "detach()"}},
      {"DataOfALazySign",
       [](Model& model, at::Tensor data, at::Tensor) {
         return torch::imag(torch::view_as_complex(model(data).view({2, 2, 2})).conj()).data().sum();
       },
       {kFourth, "with a lazy sign", "detach()"}},
      {"BooleanIndex",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor output = model(data);
         return output.index({output > 0}).sum();
       },
       {"aten::", kFourth, "depends on data"}},
      {"SetData",
       [](Model& model, at::Tensor data, at::Tensor) {
         at::Tensor output = model(data);
         output.set_data(torch::zeros_like(output));
         return output;
       },
       {kFourth, "replaces the data"}},
      {"SetDataOfOtherSizes",
       [](Model& model, at::Tensor data, at::Tensor) {
         model.module()->first->bias.set_data(torch::zeros({4}));
         return model(data);
       },
       {"smp::set_data", "'first.bias' to be replaced", "got Float of sizes [4]", "copy_"}},
      {"EqualOfAnActivation",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor output = model(data);
         return torch::equal(output, output.clone()) ? output : output * 2;
       },
       {"aten::equal", kFourth, "torch::where"}},
      {"EqualOfAnActivationAtTheEnd",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor output = model(data), twice = output * 2;
         return torch::equal(output, twice) ? output : twice;
       },
       {"aten::equal", kFourth, "torch::where"}},
      {"EqualOfParameters",
       [](Model& model, at::Tensor data, at::Tensor) {
         const auto& net = *model.module();
         const at::Tensor output = model(data);
         return torch::equal(net.first->weight, net.second->weight) ? output : output.slice(0, 0, 1);
       },
       {"aten::equal", kFourth, "torch::where"}},
      {"EmptyReadUnwritten",
       [](Model& model, at::Tensor data, at::Tensor) { return model(data * torch::empty({8})); },
       {"reads the result of empty()", "raw pointer"}},
      {"WriteToAConstant",
       [calls = torch::zeros({1})](Model& model, at::Tensor data, at::Tensor) {
         at::Tensor counter = calls;
         counter.add_(1);
         return model(data);
       },
       {"aten::add_ writes to a tensor of sizes [1]", "register_buffer"}},
      {"StatisticsOfANormInTraining",
       [mean = torch::zeros({4}), var = torch::ones({4})](Model& model, at::Tensor data, at::Tensor) {
         return torch::batch_norm(model(data), {}, {}, mean, var, /*training=*/true, 0.1, 1e-5, false);
       },
       {"aten::batch_norm writes to a tensor of sizes [4]", "register_buffer"}},
      {"OwnException",
       [](Model& model, at::Tensor data, at::Tensor) -> at::Tensor {
         model(data);
         throw std::runtime_error("the loader is broken");
       },
       {"the loader is broken"}},
  };
}

std::vector<Refusal> pointer_refusals() {
  return {
      {"RawWriteToEmpty",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor mask = torch::empty({8});
         std::fill_n(mask.data_ptr<float>(), 8, 1.0F);
         return model(data * mask);
       },
       {"raw pointer to the result of aten::empty", "outside of the step"}},
      {"PointerOfAnActivation",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor output = model(data);
         return output * output.data_ptr<float>()[0];
       },
       {"raw pointer to the result of aten::", kFourth, "tensor.cpu()"}},
      {"ConstPointerOfAnActivation",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor output = model(data);
         return output * output.const_data_ptr<float>()[0];
       },
       {"raw pointer to the result of aten::", kFourth}},
      {"UntypedConstPointerOfAView",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor row = model(data).select(0, 1);
         return row * *static_cast<const float*>(row.const_data_ptr());
       },
       {"raw pointer to the result of aten::", kFourth}},
      {"UntypedMutablePointerAfterAWriteInPlace",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor output = model(data).mul_(2);
         return output * *static_cast<float*>(output.mutable_data_ptr());
       },
       {"raw pointer to the result of aten::", kFourth}},
      {"AccessorOfAnActivation",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor output = model(data);
         return output * output.accessor<float, 2>()[0][0];
       },
       {"raw pointer to the result of aten::", kFourth}},
      {"StorageOfAnArgument",
       [](Model& model, at::Tensor data, at::Tensor) {
         return model(data) * static_cast<const float*>(data.storage().data())[0];
       },
       {"raw pointer to step argument 0"}},
      {"PointerOfAnOutGivenToAnOperator",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor output = model(data), sum = torch::zeros_like(output);
         at::Tensor halves = sum.slice(0, 0, 1);
         torch::add_out(halves, output.detach().slice(0, 0, 1), sum.slice(0, 1, 2));
         return output * halves.data_ptr<float>()[0];
       },
       {"raw pointer to the result of aten::zeros_like", kFourth}},
      {"TensorOfAVector",
       [](Model& model, at::Tensor data, at::Tensor) { return model(data * torch::tensor(std::vector<float>(8, 0.5F))); },
       {"raw pointer to the result of aten::empty", "outside of the step"}},
  };
}

std::vector<Refusal> gradient_refusals() {
  return {
      {"CustomAutogradFunction",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor loss = Doubled::apply(model(data)).sum();
         model.backward(loss);
         return loss;
       },
       {kFourth, "custom autograd function"}},
      {"LossBackward",
       [](Model& model, at::Tensor data, at::Tensor target) {
         const at::Tensor loss = torch::mse_loss(model(data), target);
         loss.backward();
         return loss;
       },
       {"as the only backward, got loss.backward() inside a step body, or torch::autograd::grad",
        "Train with model.backward(loss)"}},
      {"AutogradGrad",
       [](Model& model, at::Tensor data, at::Tensor target) {
         const at::Tensor output = model(data);
         return torch::autograd::grad({torch::mse_loss(output, target)}, {output})[0];
       },
       {"autograd, " + kFourth, "torch::autograd::grad", "smp::opaque"}},
      {"AutogradGradOfWhatIsNotReached",
       [](Model& model, at::Tensor data, at::Tensor target) {
         const at::Tensor output = model(data), loss = torch::mse_loss(output, target);
         const auto gradients = torch::autograd::grad({loss}, {model.module()->first->weight, output * 2}, {}, true, false,
                                                      /*allow_unused=*/true);
         model.backward(gradients[0].defined() ? loss + gradients[0].sum() : loss);
         return loss;
       },
       {"autograd, " + kFourth, "torch::autograd::grad", "smp::opaque"}},
      {"AutogradBackwardWithInputs",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor output = model(data);
         torch::autograd::backward({output.sum()}, {}, std::nullopt, false, {model.module()->first->weight});
         return output;
       },
       {"autograd, " + kFourth, "model.backward(loss)"}},
      {"ExternalTrainableTensor",
       [scale = torch::ones({8}, torch::requires_grad())](Model& model, at::Tensor data, at::Tensor) {
         return model(data * scale);
       },
       {"sizes [8]", "register_parameter"}},
      {"GradientFunctionFromAnotherThread",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor scale = in_another_thread([] { return torch::ones({8}, torch::requires_grad()).exp(); });
         return model(data * scale);
       },
       {"on another thread"}},
      {"ParameterUsedOnAnotherThread",
       [](Model& model, at::Tensor data, at::Tensor) {
         const at::Tensor scale = in_another_thread([&] { return model.module()->first->bias * 2; });
         return model(data * scale);
       },
       {"on another thread"}},
  };
}

std::vector<Refusal> refusals() {
  std::vector<Refusal> all = value_refusals();
  for (Refusal& refusal : pointer_refusals()) all.push_back(std::move(refusal));
  for (Refusal& refusal : gradient_refusals()) all.push_back(std::move(refusal));
  return all;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

class Refused : public testing::TestWithParam<std::tuple<Refusal, int>> {};

TEST_P(Refused, OnEveryRankWithOneTextBeforeAnythingChanges) {
  const auto& [refusal, ranks] = GetParam();
  std::mutex mutex;
  std::set<std::string> messages;
  tests::run_smp_ranks(ranks, {.microbatches = 2}, [&, &refused = refusal] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    auto bad = smp::step([&](at::Tensor data, at::Tensor target) { return refused.body(model, data, target); });
    auto good = tests::training_step(model);
    const at::Tensor data = rows(4, 8, 1), target = rows(4, 4, 2);
    for (int round = 0; round < 3; ++round) {
      const std::string message = message_of([&] { bad(data, target); });
      tests::expect_twins(model, *twin, "after the refusal");
      EXPECT_EQ(model.partitioned(), round > 0);
      support::expect_bit_equal(good(data, target).outputs(), tests::eager_step(*twin, data, target, 2), "loss");
      tests::expect_twins(model, *twin, "after the step");
      const std::lock_guard<std::mutex> lock(mutex);
      messages.insert(message);
    }
  });
  EXPECT_EQ(messages.size(), 1U) << testing::PrintToString(messages);
  for (const std::string& text : refusal.texts) {
    EXPECT_NE(messages.begin()->find(text), std::string::npos) << text << " is not in: " << *messages.begin();
  }
}

INSTANTIATE_TEST_SUITE_P(Bodies, Refused, testing::Combine(testing::ValuesIn(refusals()), testing::Values(1, 2)),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + "_on_" + std::to_string(std::get<1>(test.param));
                         });

class Kept : public testing::TestWithParam<int> {};

TEST_P(Kept, GhostUsedInTheNextStepIsRefusedOnEveryRank) {
  tests::run_smp_ranks(GetParam(), {}, [] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    at::Tensor kept;
    auto step = smp::step([&](at::Tensor data) {
      at::Tensor output = model(data);
      if (kept.defined()) output = output + kept;
      kept = output;
      return output;
    });
    const at::Tensor data = rows(4, 8, 1);
    support::expect_bit_equal(step(data)[0], twin->forward(data).detach(), "the first output");
    for (int again = 0; again < 2; ++again) {
      const std::string message = message_of([&] { step(data); });
      EXPECT_NE(message.find("ghost of an earlier run"), std::string::npos) << message;
    }
    kept = at::Tensor();
    support::expect_bit_equal(step(data)[0], twin->forward(data).detach(), "a later output");
  });
}

TEST_P(Kept, GhostOfARunThatThrewIsRefused) {
  tests::run_smp_ranks(GetParam(), {}, [] {
    const auto net = make_net();
    Model model(net);
    at::Tensor kept;
    bool throws = false;
    auto step = smp::step([&](at::Tensor data) {
      at::Tensor hidden = net->first(data);
      if (!kept.defined()) kept = hidden;
      if (throws) throw std::runtime_error("stop");
      return hidden + kept;
    });
    const at::Tensor data = rows(4, 8, 1);
    step(data);
    kept = at::Tensor();
    throws = true;
    EXPECT_EQ(message_of([&] { step(data); }), "stop");
    throws = false;
    const std::string message = message_of([&] { step(data); });
    EXPECT_NE(message.find("ghost of an earlier run"), std::string::npos) << message;
  });
}

TEST_P(Kept, GhostOfARunThatLeftItsRecordingIsRefused) {
  tests::run_smp_ranks(GetParam(), {}, [] {
    const auto net = make_net();
    Model model(net);
    at::Tensor kept;
    bool squashes = false;
    auto step = smp::step([&](at::Tensor data) {
      at::Tensor hidden = net->first(data);
      if (!kept.defined()) kept = hidden;
      hidden = hidden + kept;
      return squashes ? torch::tanh(hidden) : torch::relu(hidden);
    });
    const at::Tensor data = rows(4, 8, 1);
    for (const bool squash : {false, true}) {
      kept = at::Tensor();
      squashes = squash;
      step(data);
    }
    squashes = false;
    const std::string message = message_of([&] { step(data); });
    EXPECT_NE(message.find("ghost of an earlier run"), std::string::npos) << message;
  });
}

TEST_P(Kept, GhostUsedAfterTheStepThrows) {
  tests::run_smp_ranks(GetParam(), {}, [] {
    const auto net = make_net();
    Model model(net);
    at::Tensor kept;
    auto step = smp::step([&](at::Tensor data) { return kept = model(data); });
    step(rows(4, 8, 1));
    if (pp_rank() != 0) return;
    const std::string message = message_of([&] { kept.add(1); });
    EXPECT_NE(message.find("got a ghost of a step body that has ended"), std::string::npos) << message;
  });
}

TEST_P(Kept, ModelCalledOutsideOfAStepThrows) {
  tests::run_smp_ranks(GetParam(), {}, [] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    const at::Tensor data = rows(4, 8, 1), target = rows(4, 4, 2);
    const std::string call = message_of([&] { model(data); });
    EXPECT_NE(call.find("expected a call inside a step body"), std::string::npos) << call;
    const std::string backward = message_of([&] { model.backward(data.sum()); });
    EXPECT_NE(backward.find("expected a call inside a step body"), std::string::npos) << backward;
    auto good = tests::training_step(model);
    support::expect_bit_equal(good(data, target).outputs(), tests::eager_step(*twin, data, target, 1), "loss");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Kept, testing::Values(1, 2));

}  // namespace
}  // namespace smp
