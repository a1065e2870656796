// What replaying a captured step costs against running it eagerly: forward and backward, one thread, in turn.
#include <torch/torch.h>

#include "benchmarks/captured_step.h"
#include "benchmarks/measure.h"

namespace {

using namespace smp::benchmarks;
namespace nn = torch::nn;

constexpr TransformerSize kTransformer{.width = 200, .vocabulary = 1000, .rows = 2, .tokens = 32};

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
  const Comparison times = compare(kRounds, repeated(calls_per_round, [&] { replay.run(); }),
                                   repeated(calls_per_round, [&] { timed.run_eagerly(); }));
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
    measure("replay_vs_eager_transformer", transformer(kTransformer, 0.2), transformer(kTransformer, 0), 4);
  }
  if (is_wanted(argc, argv, "replay_vs_eager_small_ops")) {
    const Case chain = small_operators();
    measure("replay_vs_eager_small_ops", chain, chain, 20);
  }
}
