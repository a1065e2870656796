// Trains and evaluates with a timeline: timeline_processes FILE STAGES RECORDED_STEPS TOKEN. One line per rank at the end.
#include <torch/torch.h>

#include <iostream>
#include <string>

#include "smp/smp.h"

namespace {

constexpr int64_t kRows = 8, kWidth = 16, kMicrobatches = 4, kSteps = 6;

torch::nn::Sequential make_net() {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
  return net;
}

void train() {
  smp::DistributedModel model(make_net());
  auto train_step = smp::step([&](at::Tensor data) {
    auto loss = model(data).square().mean();
    model.backward(loss);
    return loss;
  });
  auto evaluate = smp::step([&](at::Tensor data) { return model(data).square().mean(); });
  const auto data = torch::randn({kMicrobatches * kRows, kWidth});
  for (int64_t i = 0; i < kSteps; ++i) train_step(data);
  const torch::NoGradGuard no_grad;
  evaluate(data);
}

}  // namespace

int main(int argc, char** argv) {
  smp::Config config;
  config.microbatches = kMicrobatches;
  config.timeline = argc > 1 ? argv[1] : "";
  config.timeline_steps = argc > 3 ? std::stol(argv[3]) : 1;
  config.pipeline_parallel_degree = argc > 2 ? std::stol(argv[2]) : 0;
  smp::init(config);
  train();
  std::cout << "say: rank " << smp::rank() << " done" << std::endl;
  smp::shutdown();
}
