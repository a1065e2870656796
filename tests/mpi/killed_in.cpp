// Two replicas of two stages, one of whose ranks kills itself in a phase of its fourth step: killed_in PHASE RANK FOLDER
// TOKEN. Driven by killed_in_test.py.
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "smp/smp.h"

namespace {

constexpr int kLast = 3;

std::string phase_of_death;  // "" until that step

void perhaps_die(const std::string& phase) {
  if (phase != phase_of_death) return;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  std::printf("dies at %.3f\n", static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec));
  std::fflush(stdout);
  raise(SIGKILL);
}

struct Watched : torch::autograd::Function<Watched> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    perhaps_die("forward");
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    perhaps_die("backward");
    return gradients;
  }
};

struct Net : torch::nn::Module {
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : *layers) x = smp::opaque([](at::Tensor y) { return Watched::apply(y); }, layer.forward(x));
    return x;
  }
  torch::nn::Sequential layers =
      register_module("layers", torch::nn::Sequential(torch::nn::Linear(16, 16), torch::nn::Linear(16, 16),
                                                      torch::nn::Linear(16, 16), torch::nn::Linear(16, 16)));
};

// In the middle of a file.
void die_in_the_save() {
  signal(SIGXFSZ, [](int) { perhaps_die("save"); });
  const rlimit small{.rlim_cur = 1000, .rlim_max = 1000};
  setrlimit(RLIMIT_FSIZE, &small);
}

}  // namespace

int main(int, char** argv) {
  const std::string phase = argv[1], folder = argv[3];
  smp::init({.pipeline_parallel_degree = 2, .microbatches = 2, .log_level = smp::LogLevel::kWarning});
  const bool is_victim = smp::rank() == std::stoi(argv[2]);
  auto net = std::make_shared<Net>();
  smp::DistributedModel model(net);
  smp::DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.01), model);
  model.register_comm_hook([](const smp::GradientBucket& bucket) {
    perhaps_die("reduction");
    return smp::all_reduce_mean(bucket.gradients, smp::DP_GROUP);
  });
  auto train_step = smp::step([&](at::Tensor x) {
    auto loss = model(x).square().mean();
    model.backward(loss);
    return loss;
  });
  for (int step = 0;; ++step) {
    if (is_victim && step == kLast) phase_of_death = phase;
    optimizer.zero_grad();
    train_step(torch::ones({8, 16}));
    perhaps_die("optimizer");
    optimizer.step();
    if (phase_of_death == "save") die_in_the_save();
    if (phase == "save" && step == kLast) smp::save_state(folder, model, optimizer);
  }
}
