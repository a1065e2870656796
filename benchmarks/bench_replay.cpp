// What replaying a captured step costs against running it eagerly: forward and backward, one thread, in turn.
#include <torch/torch.h>

#include "benchmarks/captured_step.h"
#include "benchmarks/measure.h"
#include "examples/transformer_lm/model.h"

namespace {

using namespace smp::benchmarks;
namespace nn = torch::nn;

struct Case {
  std::shared_ptr<nn::Module> module;
  std::vector<at::Tensor> inputs;
  LossBody body;

  at::Tensor run_eagerly() const {
    const at::Tensor loss = body(inputs);
    loss.backward();
    return loss;
  }
};

Case transformer(double dropout) {
  constexpr int64_t kVocabulary = 1000, kRows = 2, kTokens = 32;
  torch::manual_seed(1);
  auto net = std::make_shared<transformer_lm::TransformerLm>(transformer_lm::ModelOptions{
      .vocab = kVocabulary, .width = 200, .heads = 4, .hidden = 800, .layers = 4, .dropout = dropout});
  const auto random_tokens = [] { return torch::randint(kVocabulary, {kRows, kTokens}, torch::kLong); };
  return {net, {random_tokens(), random_tokens()}, [net](const auto& inputs) {
            const auto logits = net->forward(inputs[0]);
            return nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}), inputs[1].reshape({-1}));
          }};
}

Case small_operators() {
  constexpr int kLayers = 64;
  constexpr int64_t kWidth = 4;
  torch::manual_seed(1);
  nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) {
    net->push_back(nn::Linear(kWidth, kWidth));
    net->push_back(nn::ReLU());
  }
  return {
      net.ptr(), {torch::rand({1, kWidth})}, [net](const auto& inputs) mutable { return net->forward(inputs[0]).sum(); }};
}

// `checked` is `timed` without randomness.
void measure(const char* name, const Case& timed, const Case& checked, int calls_per_round) {
  constexpr int kRounds = 61;
  OneStageReplay check(*checked.module, checked.inputs, checked.body);
  require_same_step(*checked.module, check, [&] { return checked.run_eagerly(); });

  OneStageReplay replay(*timed.module, timed.inputs, timed.body);
  const auto many = [calls_per_round](auto&& call) {
    return [call, calls_per_round] {
      for (int i = 0; i < calls_per_round; ++i) call();
    };
  };
  const Comparison times = compare(kRounds, many([&] { replay.run(); }), many([&] { timed.run_eagerly(); }));
  const double to_us = 1e6 / calls_per_round;
  report(name, times.ratio, "x",
         {{"replay us", times.first_seconds * to_us},
          {"eager us", times.second_seconds * to_us},
          {"operators", static_cast<double>(replay.num_operators())}});
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (is_wanted(argc, argv, "replay_vs_eager_transformer")) {
    measure("replay_vs_eager_transformer", transformer(0.2), transformer(0), 4);
  }
  if (is_wanted(argc, argv, "replay_vs_eager_small_ops")) {
    const Case chain = small_operators();
    measure("replay_vs_eager_small_ops", chain, chain, 20);
  }
}
