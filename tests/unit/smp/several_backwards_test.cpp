// Several model calls and several backwards in one body, and parameters that a rank visits several times, against the
// same loop without smp: the same bits.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::expect_as_in_a_loop;
using tests::make_net;
using tests::MicrobatchRun;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;

/// Layers one after the other on alternating ranks, so that each rank is visited twice.
std::shared_ptr<SmallNet> alternating_net() {
  auto net = make_net();
  if (pp_size() == 1) return net;
  set_partition(*net->first, 0);
  set_partition(*net->second, 1);
  set_partition(*net->third, 0);
  set_partition(*net->fourth, 1);
  return net;
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
  static void check(const std::function<at::Tensor(const MicrobatchRun&)>& body) {
    const auto [ranks, pipeline] = GetParam();
    const Config config{.microbatches = 4, .pipeline = pipeline};
    expect_as_in_a_loop<SmallNet>({.ranks = ranks, .steps = 3, .config = config, .make = alternating_net}, body);
  }
};

TEST_P(SeveralBackwards, OfSeveralForwardsAddUpInOrder) {
  check([](const MicrobatchRun& run) {
    const at::Tensor first = run.forward(run.data).square().mean();
    run.backward(first);
    const at::Tensor second = run.forward(run.data * 0.5).abs().mean();
    run.backward(second);
    return first + second;
  });
}

TEST_P(SeveralBackwards, MayShareAForward) {
  check([](const MicrobatchRun& run) {
    const at::Tensor output = run.forward(run.data);
    const at::Tensor first = output.square().mean(), second = output.exp().mean();
    run.backward(first);
    run.backward(second);
    return first;
  });
}

TEST_P(SeveralBackwards, MayReachOnlyAPartOfTheModel) {
  check([](const MicrobatchRun& run) {
    const at::Tensor whole = run.forward(run.data).square().mean();
    const at::Tensor detached = run.forward(run.forward(run.data).detach().repeat({1, 2})).abs().mean();
    run.backward(detached);
    run.backward(whole);
    return detached.detach() * whole.detach();
  });
}

TEST_P(SeveralBackwards, OfASiameseModelWithOneBackward) {
  check([](const MicrobatchRun& run) {
    const at::Tensor loss = (run.forward(run.data) - run.forward(run.data.flip(0)).roll(1)).square().mean();
    run.backward(loss);
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
    const std::string text = message_of([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(text, "expected another loss in each backward()")) << text;
  });
}

struct GainNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(first(x)) * gain); }
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
    const std::string refusal = message_of([&] { step(rows(4, 8, 1)); });
    for (const at::Tensor& parameter : model.local_parameters()) EXPECT_EQ(parameter.grad().defined(), refusal.empty());
    if (pp_rank() == 0) text = refusal;
  });
  return text;
}

TEST(SeveralBackwardsRefused, WhenWhatTheyNeedIsWrittenToAfterwards) {
  const std::string expected = ": expected operators after backward() to leave alone what the backward needs, got ";
  std::string text = refusal_after_backward([](GainNet&, const at::Tensor& input) { input.add_(0.1); });
  EXPECT_TRUE(contains(text, expected + "aten::add_, which writes to a tensor of sizes [2, 8].")) << text;
  text = refusal_after_backward([](GainNet& net, const at::Tensor&) { net.gain.mul_(0.9); });
  EXPECT_TRUE(contains(text, expected + "aten::mul_, which writes to 'gain'.")) << text;
  text = refusal_after_backward([](GainNet& net, const at::Tensor&) { net.first->weight.data().mul_(0.9); });
  EXPECT_TRUE(contains(text, expected + "aten::mul_, which writes to a tensor of sizes [8, 8].")) << text;
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
