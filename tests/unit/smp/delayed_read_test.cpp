// Models whose values are made where they are placed, and bodies that read.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "runtime/device/random.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/seeded_net.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using tests::rows;
using tests::run_smp_ranks;
using tests::seeded;

class DelayedReads : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DelayedReads, testing::Values(1, 2, 3, 4));

// What forward uses besides parameters: a tensor that is not registered.
struct MaskedNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x)) * mask); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 4));
  at::Tensor mask = torch::bernoulli(torch::full({8}, 0.5));
};

TEST_P(DelayedReads, MayUseUnregisteredTensorsAndReadOnceTheyArePlaced) {
  const at::Tensor data = rows(4, 8, 1), target = rows(4, 4, 2);
  std::vector<double> losses[2];
  for (const bool delayed : {false, true}) {
    run_smp_ranks(GetParam(), {.microbatches = 2}, [&] {
      const auto net = seeded<MaskedNet>(delayed);
      DistributedModel model(net);
      bool reads = true;
      auto step = smp::step([&](at::Tensor x, at::Tensor y) {
        at::Tensor loss = torch::mse_loss(model(x), y);
        if (reads && loss.item<double>() < 1e9) loss = loss * 2;
        if (reads) losses[delayed].push_back(loss.item<double>());
        model.backward(loss);
        return loss;
      });
      if (delayed) {
        const std::string text = support::message_of<c10::Error>([&] { step(data, target); });
        EXPECT_NE(text.find("to read no values in its body"), std::string::npos) << text;
        EXPECT_FALSE(model.partitioned());
      }
      reads = false;
      step(data, target);
      reads = true;
      losses[delayed].clear();
      step(data, target);
    });
  }
  EXPECT_EQ(losses[0].size(), 2U);
  EXPECT_EQ(losses[0], losses[1]);
}

}  // namespace
}  // namespace smp
