// How long training stands still for a save in the background, against one that waits for the disk: 384 MiB of weights and
// Adam's state on one rank, in the current folder.
#include <torch/torch.h>

#include <filesystem>

#include "benchmarks/measure.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;
namespace fs = std::filesystem;

constexpr int64_t kWidth = 2048;
constexpr int kLayers = 8, kRounds = 5;

}  // namespace

int main() {
  at::set_num_threads(1);
  smp::init({.microbatches = 1, .log_level = smp::LogLevel::kOff});
  torch::nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
  smp::DistributedModel model(net);
  smp::DistributedOptimizer optimizer(torch::optim::Adam(net->parameters()), model);
  auto train_step = smp::step([&](at::Tensor rows) {
    auto loss = model(rows).square().mean();
    model.backward(loss);
    return loss;
  });
  train_step(torch::randn({4, kWidth}));
  optimizer.step();

  const fs::path folder = "bench_save";
  smp::SaveSeries saves(folder);
  std::vector<double> waiting, stalls, writing, ratios;
  int64_t step = 0;
  saves.save_in_background(++step, model, optimizer);  // takes memory from the system, which the later ones take again
  saves.finish();
  for (int round = 0; round < kRounds; ++round) {
    waiting.push_back(seconds_of([&] { saves.save(++step, model, optimizer); }));
    stalls.push_back(seconds_of([&] { saves.save_in_background(++step, model, optimizer); }));
    writing.push_back(seconds_of([&] { saves.finish(); }));
    ratios.push_back(waiting.back() / stalls.back());
  }
  fs::remove_all(folder);
  report("save_stall", median(ratios), "x",
         {{"save s", median(waiting)}, {"in background s", median(stalls)}, {"finish s", median(writing)}});
}
