// The example's model alone, with plain LibTorch: shapes, causality, initial values, and that it learns.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "examples/transformer_lm/model.h"

namespace transformer_lm {
namespace {

ModelOptions small() { return {.vocab = 11, .width = 16, .heads = 2, .hidden = 24, .layers = 2, .max_tokens = 12}; }

at::Tensor some_tokens(int64_t batch, int64_t length) {
  return torch::arange(batch * length).mul(7).remainder(11).view({batch, length});
}

TEST(TransformerLm, LogitsHaveOneRowPerToken) {
  TransformerLm net(small());
  EXPECT_EQ(net.forward(some_tokens(3, 5)).sizes(), (std::vector<int64_t>{3, 5, 11}));
}

TEST(TransformerLm, APlaceSeesNoLaterToken) {
  TransformerLm net(small());
  net.eval();
  auto tokens = some_tokens(2, 8), changed = tokens.clone();
  changed.select(1, 5).add_(1).remainder_(11);
  auto difference = (net.forward(changed) - net.forward(tokens)).abs().amax({0, 2});
  EXPECT_EQ(difference.narrow(0, 0, 5).max().item<double>(), 0.0);
  EXPECT_GT(difference.narrow(0, 5, 3).min().item<double>(), 0.0);
}

TEST(TransformerLm, OrderOfTokensMatters) {
  TransformerLm net(small());
  net.eval();
  auto last = [&](std::vector<int64_t> tokens) { return net.forward(torch::tensor(tokens).unsqueeze(0)).select(1, 2); };
  EXPECT_FALSE(torch::allclose(last({1, 2, 3}), last({2, 1, 3}), 1e-4, 1e-5));
}

TEST(TransformerLm, PositionalEncodingIsSinusoidal) {
  TransformerLm net(small());
  auto position = net.named_buffers()["position"];
  EXPECT_NEAR(position[3][0][0].item<double>(), std::sin(3.0), 1e-6);
  EXPECT_NEAR(position[3][0][1].item<double>(), std::cos(3.0), 1e-6);
  EXPECT_NEAR(position[5][0][4].item<double>(), std::sin(5.0 * std::pow(1e4, -4.0 / 16)), 1e-6);
}

TEST(TransformerLm, WeightsStartAsInTheTutorial) {
  TransformerLm net({.vocab = 500});
  auto parameters = net.named_parameters();
  for (const char* name : {"embedding.weight", "decoder.weight"}) {
    auto largest = parameters[name].abs().max().item<double>();
    EXPECT_LE(largest, 0.1) << name;
    EXPECT_GT(largest, 0.099) << name;
  }
  EXPECT_EQ(parameters["decoder.bias"].abs().max().item<double>(), 0.0);
  EXPECT_EQ(parameters["encoder.1.linear1.weight"].sizes(), (std::vector<int64_t>{200, 200}));
}

TEST(TransformerLm, LearnsARepeatedText) {
  at::set_num_threads(1);
  torch::manual_seed(1);
  TransformerLm net(small());
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.5));
  auto text = some_tokens(4, 11);
  auto tokens = text.narrow(1, 0, 10), next = text.narrow(1, 1, 10).reshape(-1);
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    auto loss = torch::nn::functional::cross_entropy(net.forward(tokens).reshape({-1, 11}), next);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net.parameters(), 0.5);
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_NEAR(first, std::log(11.0), 0.5);
  EXPECT_LT(last, 0.3 * first);
}

TEST(TransformerLm, SizesThatDoNotFitAreRefused) {
  EXPECT_THROW(TransformerLm({.vocab = 0}), c10::ValueError);
  EXPECT_THROW(TransformerLm({.vocab = 5, .width = 10, .heads = 4}), c10::ValueError);
  EXPECT_THROW(TransformerLm({.vocab = 5, .heads = 0}), c10::ValueError);
  EXPECT_THROW(TransformerLm({.vocab = 5, .hidden = 0}), c10::ValueError);
  EXPECT_THROW(TransformerLm({.vocab = 5, .dropout = 1.5}), c10::ValueError);
  TransformerLm net(small());
  EXPECT_THROW(net.forward(some_tokens(1, 13)), c10::ValueError);
}

}  // namespace
}  // namespace transformer_lm
