// Several model calls and several backwards in one body, and parameters that a rank visits several times, against the
// same loop without smp: the same bits.
#include <gtest/gtest.h>

#include <functional>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using support::message_of;
using tests::expect_twins;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;
using Forward = std::function<at::Tensor(const at::Tensor&)>;
using Backward = std::function<void(const at::Tensor&)>;
/// A step body that works on a model of ours and on a plain module.
using SharedBody = std::function<at::Tensor(const Forward&, const Backward&, const at::Tensor&)>;

/// Layers one after the other on alternating ranks, so that each rank is visited twice.
void alternate_ranks(SmallNet& net) {
  if (pp_size() == 1) return;
  set_partition(*net.first, 0);
  set_partition(*net.second, 1);
  set_partition(*net.third, 0);
  set_partition(*net.fourth, 1);
}

/// Three steps of four microbatches whose gradients add up.
void expect_same_bits(int ranks, Pipeline pipeline, const SharedBody& body) {
  run_smp_ranks(ranks, {.microbatches = 4, .pipeline = pipeline}, [&] {
    const auto net = make_net(), twin = make_net();
    alternate_ranks(*net);
    Model model(net);
    const Forward forward = [&](const at::Tensor& x) { return model(x); };
    auto step = smp::step(
        [&](at::Tensor data) { return body(forward, [&](const at::Tensor& loss) { model.backward(loss); }, data); });
    for (int s = 0; s < 3; ++s) {
      const at::Tensor data = rows(8, 8, 10 + s);
      std::vector<at::Tensor> want;
      for (const auto& part : support::split_batch({data}, 4)) {
        const Backward backward = [](const at::Tensor& loss) { loss.div(4).backward({}, /*retain_graph=*/true); };
        want.push_back(body([&](const at::Tensor& x) { return twin->forward(x); }, backward, part[0]).detach());
      }
      const std::string what = "step " + std::to_string(s);
      expect_bit_equal(step(data).outputs(), want, what);
      expect_twins(model, *twin, what);
    }
  });
}

struct RootNet : SmallNet {
  at::Tensor root = register_parameter("root", torch::full({}, 2.0));
};

// No stage would make such a loss, and its gradient would be missing.
TEST(BackwardRoot, ThatIsAParameterIsRefusedAndItsSumIsNot) {
  run_smp_ranks(1, {.microbatches = 2}, [] {
    const auto net = std::make_shared<RootNet>();
    tests::fill(*net);
    DistributedModel<RootNet> model(net);
    const auto train = [&](bool as_sum) {
      auto step = smp::step([&, as_sum](at::Tensor data) {
        model.backward(model(data).square().mean());
        model.backward(as_sum ? net->root.sum() : net->root);
      });
      step(rows(8, 8, 1));
    };
    EXPECT_NE(message_of([&] { train(false); }).find("'root' of the model itself"), std::string::npos);
    EXPECT_FALSE(net->first->weight.grad().defined());
    train(true);
    expect_bit_equal(net->root.grad(), torch::ones({}), "gradient");
  });
}

class SeveralBackwards : public testing::TestWithParam<std::tuple<int, Pipeline>> {
 protected:
  void check(const SharedBody& body) { expect_same_bits(std::get<0>(GetParam()), std::get<1>(GetParam()), body); }
};

TEST_P(SeveralBackwards, OfSeveralForwardsAddUpInOrder) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data) {
    const at::Tensor first = forward(data).square().mean();
    backward(first);
    const at::Tensor second = forward(data * 0.5).abs().mean();
    backward(second);
    return first + second;
  });
}

TEST_P(SeveralBackwards, MayShareAForward) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data) {
    const at::Tensor output = forward(data);
    const at::Tensor first = output.square().mean(), second = output.exp().mean();
    backward(first);
    backward(second);
    return first;
  });
}

TEST_P(SeveralBackwards, MayReachOnlyAPartOfTheModel) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data) {
    const at::Tensor whole = forward(data).square().mean();
    const at::Tensor detached = forward(forward(data).detach().repeat({1, 2})).abs().mean();
    backward(detached);
    backward(whole);
    return detached.detach() * whole.detach();
  });
}

TEST_P(SeveralBackwards, OfASiameseModelWithOneBackward) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data) {
    const at::Tensor loss = (forward(data) - forward(data.flip(0)).roll(1)).square().mean();
    backward(loss);
    return loss;
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SeveralBackwards,
                         testing::Combine(testing::Values(1, 2), testing::Values(Pipeline::kSimple, Pipeline::kInterleaved)),
                         [](const auto& param) {
                           return std::to_string(std::get<0>(param.param)) +
                                  (std::get<1>(param.param) == Pipeline::kSimple ? "simple" : "interleaved");
                         });

TEST(SeveralBackwardsRefused, OfOneLossTwice) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    Model model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).mean();
      model.backward(loss);
      model.backward(loss);
      return loss;
    });
    const std::string text = support::message_of([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(support::contains(text, "expected another loss in each backward()")) << text;
  });
}

struct GainNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(first(x)) * gain); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
  at::Tensor gain = register_buffer("gain", torch::ones({8}));
  at::Tensor calls = register_buffer("calls", torch::zeros({1}));
};

std::string refusal_after_backward(const std::function<void(GainNet&, const at::Tensor& input)>& write) {
  std::string text;
  run_smp_ranks(2, {.microbatches = 2}, [&] {
    const auto net = std::make_shared<GainNet>();
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor input = data * 1, loss = model(input).square().mean();
      model.backward(loss);
      write(*net, input);
      return loss;
    });
    const std::string refusal = support::message_of([&] { step(rows(4, 8, 1)); });
    for (const at::Tensor& parameter : model.local_parameters()) EXPECT_EQ(parameter.grad().defined(), refusal.empty());
    if (pp_rank() == 0) text = refusal;
  });
  return text;
}

TEST(SeveralBackwardsRefused, WhenWhatTheyNeedIsWrittenToAfterwards) {
  const std::string expected = ": expected operators after backward() to leave alone what the backward needs, got ";
  std::string text = refusal_after_backward([](GainNet&, const at::Tensor& input) { input.add_(0.1); });
  EXPECT_TRUE(support::contains(text, expected + "aten::add_, which writes to a tensor of sizes [2, 8].")) << text;
  text = refusal_after_backward([](GainNet& net, const at::Tensor&) { net.gain.mul_(0.9); });
  EXPECT_TRUE(support::contains(text, expected + "aten::mul_, which writes to 'gain'.")) << text;
  text = refusal_after_backward([](GainNet& net, const at::Tensor&) { net.first->weight.data().mul_(0.9); });
  EXPECT_TRUE(support::contains(text, expected + "aten::mul_, which writes to a tensor of sizes [8, 8].")) << text;
}

TEST(SeveralBackwardsRefused, NotWhenTheyDoNotNeedWhatIsWrittenTo) {
  EXPECT_EQ(refusal_after_backward([](GainNet& net, const at::Tensor& input) {
              net.calls.add_(1);
              (input * 2).add_(1);
            }),
            "");
}

}  // namespace
}  // namespace smp
