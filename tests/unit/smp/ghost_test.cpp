// What a body may learn of its tensors: no values, through no door, and what torch::equal answers.
#include <ATen/autocast_mode.h>

#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::message_of;
using tests::BodyRun;
using tests::make_net;
using tests::rows;
using tests::SmallNet;
using tests::Texts;
using Model = DistributedModel<SmallNet>;

// The other tests of refusals meet the first microbatch, which is recorded; the second is matched.
TEST(RawPointer, IsRefusedInAMatchedRun) {
  tests::run_smp_ranks(1, {.microbatches = 2}, [] {
    const auto net = make_net();
    Model model(net);
    int microbatch = 0;
    auto step = smp::step([&](at::Tensor data) {
      at::Tensor output = model(data);
      if (++microbatch == 2) output = output * output.const_data_ptr<float>()[0];
      return output;
    });
    const std::string message = message_of([&] { step(rows(4, 8, 1)); });
    EXPECT_NE(message.find("raw pointer to the result of aten::add"), std::string::npos) << message;
    EXPECT_NE(message.find("in or after module 'fourth'"), std::string::npos) << message;
  });
}

TEST(RawPointer, OfAGhostKeptBeyondItsBodyIsRefused) {
  tests::run_smp_ranks(1, {}, [] {
    const auto net = make_net();
    Model model(net);
    at::Tensor kept;
    auto step = smp::step([&](at::Tensor data) { return kept = model(data); });
    for (int s = 0; s < 2; ++s) {
      step(rows(4, 8, 1));
      const std::string message = message_of([&] { kept.data_ptr<float>(); });
      EXPECT_NE(message.find("raw pointer to"), std::string::npos) << message;
      kept = at::Tensor();
    }
  });
}

class Hook : public testing::TestWithParam<std::pair<std::string, std::function<void(const at::Tensor&)>>> {};

// A hook on a ghost would be lost with it, and the gradients be others without a word.
TEST_P(Hook, OnAnActivationIsRefusedWhileRecordingMatchingAndGoingBack) {
  for (const int hooked_step : {0, 1, 2}) {
    tests::Loop<SmallNet> loop{.steps = hooked_step + 2, .config = {.microbatches = 2}};
    loop.refusal = [&](int step) { return step == hooked_step ? Texts{"gradient hooks on parameters only"} : Texts(); };
    tests::expect_as_in_a_loop<SmallNet>(loop, [&](const BodyRun<SmallNet>& run) {
      const at::Tensor hidden = run.net.first(run.data);
      if (run.step == hooked_step && run.microbatch == 1) GetParam().second(hidden);
      const bool squash = run.step == 2;  // leaves the recording after the hook
      const at::Tensor loss = run.trained(run.net.fourth(squash ? hidden.tanh() : hidden.relu()).square().mean());
      return hidden.retains_grad() && !hidden.grad().defined() ? loss * 2 : loss;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Hook,
                         testing::Values(Hook::ParamType{"Function",
                                                         [](const at::Tensor& ghost) {
                                                           ghost.register_hook([](at::Tensor grad) { return grad * 2; });
                                                         }},
                                         Hook::ParamType{"RetainGrad",
                                                         [](const at::Tensor& ghost) { ghost.retain_grad(); }}),
                         [](const auto& test) { return test.param.first; });

// Its grad() would stay undefined.
TEST(RequiresGrad, OfATensorOfTheBodyIsRefusedWhileRecordingAndMatching) {
  tests::Loop<SmallNet> loop{.config = {.microbatches = 2}};
  loop.refusal = [](int step) { return step % 2 == 0 ? Texts{"made to require a gradient (requires_grad_)"} : Texts(); };
  tests::expect_as_in_a_loop<SmallNet>(loop, [](const BodyRun<SmallNet>& run) {
    at::Tensor data = run.data;
    if (run.step % 2 == 0) data.requires_grad_();
    const at::Tensor loss = tests::train_once(run);
    return data.grad().defined() ? loss * 2 : loss;
  });
}

TEST(ParameterHook, Runs) {
  const auto hooked = [] {
    auto net = make_net();
    for (const auto& parameter : net->parameters()) parameter.register_hook([](at::Tensor grad) { return grad * 2; });
    return net;
  };
  tests::expect_as_in_a_loop<SmallNet>({.ranks = 2, .make = hooked}, tests::train_once);
}

// Models ask for devices to choose kernels, to move masks and to open autocast.
TEST(Device, TakesTheBranchesOfALoop) {
  tests::expect_as_in_a_loop<SmallNet>({.ranks = 2}, [](const BodyRun<SmallNet>& run) {
    const at::Tensor weight = run.net.first->weight;
    at::Tensor data = run.data.to(weight.device());
    data = data.is_cpu() && !data.is_meta() && data.device() == weight.device() ? data * 2 : data;
    data = data.toString() == weight.toString() ? data + 1 : data;
    const auto device = data.device().type();
    at::autocast::set_autocast_enabled(device, true);
    const at::Tensor output = run.forward(data);
    at::autocast::set_autocast_enabled(device, false);
    at::autocast::clear_cache();
    const at::Tensor loss = (output.to(weight.options()) * torch::arange(4, output.device())).square().mean();
    run.backward(loss);
    run.trace.push_back(output.scalar_type() == at::kBFloat16);
    return loss;
  });
}

/// Its two tensors are no part of the module for smp.
struct EqualNet : SmallNet {
  at::Tensor one = torch::ones({3}), other = torch::ones({3});
};

TEST(Equal, OfTensorsMadeOutsideReadsTheirValuesInEveryRun) {
  tests::Loop<EqualNet> loop{.config = {.microbatches = 2}, .trains = false};
  loop.before_step = [](EqualNet& net, int step) { net.other[1] = step % 2 == 0 ? 1 : 5; };
  tests::expect_as_in_a_loop<EqualNet>(loop, [](const BodyRun<EqualNet>& run) {
    const at::Tensor output = run.forward(run.data);
    return torch::equal(run.net.one, run.net.other) ? output : output * 2;
  });
}

TEST(Equal, OfDifferentSizesIsNo) {
  tests::expect_as_in_a_loop<SmallNet>({.steps = 2}, [](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data);
    return torch::equal(output, run.data) ? output * 2 : output;
  });
}

struct Attention : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor key = copies ? x.clone() : x, value = copies_value ? x.clone() : key;
    return std::get<0>(heads(x, key, value));
  }
  torch::nn::MultiheadAttention heads =
      register_module("heads", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2).bias(true)));
  bool copies = false, copies_value = false;
};

// LibTorch asks torch::equal whether one projection of the stacked weights will do. For copies it finds "yes" by their
// values and capture answers "no": the same products, added up elsewhere.
TEST(Equal, ChoosesTheProjectionsOfMultiheadAttention) {
  for (const bool copies : {false, true}) {
    for (const bool copies_value : {false, true}) {
      tests::run_smp_ranks(1, {.microbatches = 2}, [&] {
        const auto net = std::make_shared<Attention>(), twin = std::make_shared<Attention>();
        tests::fill(*net), tests::fill(*twin);
        net->copies = twin->copies = copies;
        net->copies_value = twin->copies_value = copies_value;
        DistributedModel<Attention> model(net);
        auto step = tests::training_step(model);
        const at::Tensor data = rows(4 * 3, 8, 1).view({4, 3, 8}), target = rows(4 * 3, 8, 2).view({4, 3, 8});
        for (int s = 0; s < 3; ++s) {
          const auto losses = step(data, target).outputs(), want = tests::eager_step(*twin, data, target, 2);
          for (size_t m = 0; m < want.size(); ++m) support::expect_close(losses[m], want[m], 1e-6, "loss");
        }
        for (const auto& [name, tensor] : model.local_named_parameters()) {
          support::expect_close(tensor.grad(), twin->named_parameters()[name].grad(), 1e-5, name);
        }
      });
    }
  }
}

}  // namespace
}  // namespace smp
