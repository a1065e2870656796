// What a taped stage gains over eager LibTorch: forward and backward of one microbatch on one rank and one thread, in turn.
// The ratio is eager time over taped time. Losses and gradients are compared bit for bit before anything is timed.
#include <torch/torch.h>

#include "benchmarks/captured_step.h"
#include "benchmarks/measure.h"
#include "examples/common/tensor_memory.h"

namespace {

using namespace smp::benchmarks;
namespace nn = torch::nn;

Case mlp(int layers, int64_t width, int64_t rows) {
  torch::manual_seed(1);
  nn::Sequential net;
  for (int i = 0; i < layers; ++i) {
    net->push_back(nn::Linear(width, width));
    net->push_back(nn::ReLU());
  }
  return {net.ptr(), {torch::rand({rows, width}), torch::rand({rows, width})}, [net](const auto& inputs) mutable {
            return torch::mse_loss(net->forward(inputs[0]), inputs[1]);
          }};
}

// `checked` is `timed` without randomness.
void measure(const char* name, const Case& timed, const Case& checked, int calls_per_round) {
  constexpr int kRounds = 41, kWarmUp = 3;  // recorded, compared, taped
  OneStageReplay check(*checked.module, checked.inputs, checked.body, smp::runtime::make_tape_stage);
  for (int i = 0; i < kWarmUp; ++i) require_same_step(*checked.module, check, [&] { return checked.run_eagerly(); });

  OneStageReplay tape(*timed.module, timed.inputs, timed.body, smp::runtime::make_tape_stage);
  for (int i = 0; i < kWarmUp; ++i) tape.run();
  require(tape.stays_on_autograd().empty(), std::string(name) + " is not taped: " + tape.stays_on_autograd());
  const Comparison times = compare(kRounds, repeated(calls_per_round, [&] { timed.run_eagerly(); }),
                                   repeated(calls_per_round, [&] { tape.run(); }));
  const double to_us = 1e6 / calls_per_round;
  report(name, times.ratio, "x", {{"eager us", times.first_seconds * to_us}, {"tape us", times.second_seconds * to_us}});
}

// Most bytes of tensors at once in one microbatch, beyond what is there before it. Parameters have gradients.
int64_t peak_bytes(const std::function<void()>& microbatch) {
  examples::TensorMemory memory;
  microbatch();
  return memory.peak_bytes();
}

void measure_memory(const std::vector<Case>& cases) {
  double worst = 0, worst_tape = 0, worst_eager = 0;
  for (const Case& one : cases) {
    OneStageReplay tape(*one.module, one.inputs, one.body, smp::runtime::make_tape_stage);
    for (int i = 0; i < 3; ++i) tape.run();
    const auto taped = static_cast<double>(peak_bytes([&] { tape.run(); }));
    const auto eager = static_cast<double>(peak_bytes([&] { one.run_eagerly(); }));
    if (taped / eager < worst) continue;
    worst = taped / eager, worst_tape = taped, worst_eager = eager;
  }
  constexpr double kMiB = 1 << 20;
  report("tape_vs_eager_memory", worst, "x", {{"tape MiB", worst_tape / kMiB}, {"eager MiB", worst_eager / kMiB}});
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  struct Chain {
    const char* name;
    int layers;
    int64_t width, rows;
    int calls_per_round;
  };
  for (const Chain& chain :
       {Chain{"tape_vs_eager_mlp64_32", 64, 64, 32, 10}, Chain{"tape_vs_eager_mlp64_4", 64, 64, 4, 10},
        Chain{"tape_vs_eager_mlp256", 16, 256, 32, 10}, Chain{"tape_vs_eager_mlp512", 16, 512, 64, 3}}) {
    if (!is_wanted(argc, argv, chain.name)) continue;
    const Case model = mlp(chain.layers, chain.width, chain.rows);
    measure(chain.name, model, model, chain.calls_per_round);
  }
  // Small operators, as in a microbatch of short sequences; and large ones.
  const TransformerSize small{.width = 64, .vocabulary = 200, .rows = 2, .tokens = 16};
  const TransformerSize large{.width = 512, .vocabulary = 1000, .rows = 4, .tokens = 32};
  constexpr double kDropout = 0.2;
  if (is_wanted(argc, argv, "tape_vs_eager_transformer64")) {
    measure("tape_vs_eager_transformer64", transformer(small, kDropout), transformer(small, 0), 10);
  }
  if (is_wanted(argc, argv, "tape_vs_eager_transformer512")) {
    measure("tape_vs_eager_transformer512", transformer(large, kDropout), transformer(large, 0), 2);
  }
  if (is_wanted(argc, argv, "tape_vs_eager_memory")) {
    measure_memory({mlp(64, 64, 32), mlp(16, 512, 64), transformer(small, kDropout), transformer(large, kDropout)});
  }
}
