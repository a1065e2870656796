// A run that goes on from its newest save, however it has ended before. recovering FOLDER LAST [PACE] prints the loss of
// each step below LAST, exactly, and saves behind one in ten; behind each it waits for a byte of the pipe PACE. A FOLDER
// that ends with '@' is one of each host's own, FOLDER and the host's name, and gets a save behind every step. Ends with 75
// where it is asked to stop. Driven by fault_soak.py, slurm_test.py and two_hosts_test.py.
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <string>

#include "smp/smp.h"

namespace {

constexpr int kVocabulary = 50, kWidth = 32, kStepsBetweenSaves = 10;

at::Tensor batch(int64_t step) {
  auto numbers = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  const at::Tensor whole = torch::randint(kVocabulary, {8, 9}, numbers, torch::kLong);
  return whole.chunk(smp::dp_size())[smp::dp_rank()];
}

std::string host() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace

int main(int argc, char** argv) {
  std::puts("begins");
  std::fflush(stdout);
  smp::init();
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Embedding(kVocabulary, kWidth),
                            torch::nn::Flatten(torch::nn::FlattenOptions().start_dim(0).end_dim(1)),
                            torch::nn::BatchNorm1d(kWidth), torch::nn::Linear(kWidth, kWidth), torch::nn::ReLU(),
                            torch::nn::Dropout(0.2), torch::nn::Linear(kWidth, kVocabulary));
  smp::DistributedModel model(net);
  smp::DistributedOptimizer optimizer(torch::optim::Adam(net->parameters(), 1e-3), model);
  auto train_step = smp::step([&](at::Tensor tokens) {
    auto loss = torch::cross_entropy_loss(model(tokens), tokens.flatten());
    model.backward(loss);
    return loss;
  });
  const std::string folder = argv[1];
  const bool is_of_host = folder.ends_with('@');
  smp::SaveSeries saves =
      is_of_host ? smp::SaveSeries(folder + host(), 2, smp::SaveCopies::kOnEachHost) : smp::SaveSeries(folder);
  const int64_t last = std::stoll(argv[2]);
  std::FILE* const pace = argc > 3 && smp::rank() == 0 ? std::fopen(argv[3], "r") : nullptr;
  if (pace != nullptr) std::setvbuf(pace, nullptr, _IONBF, 0);  // else a rank that dies takes more than its own byte
  int64_t step = 0;
  if (const auto resumed = saves.resume(model, optimizer)) step = resumed->step;
  for (; step < last; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = smp::all_reduce_mean(train_step(batch(step)).reduce_mean());
    optimizer.step();
    if (smp::rank() == 0) std::printf("loss %lld %a\n", static_cast<long long>(step), loss.item<double>());
    std::fflush(stdout);
    if (pace != nullptr) std::fgetc(pace);
    const bool stops = smp::stop_requested();
    if (is_of_host)
      saves.save_in_background(step + 1, model, optimizer);
    else if (stops || step + 1 == last || (step + 1) % kStepsBetweenSaves == 0)
      saves.save(step + 1, model, optimizer);
    if (stops) {
      saves.finish();
      smp::shutdown();
      return smp::kExitPreempted;
    }
  }
  saves.finish();
  smp::shutdown();
}
