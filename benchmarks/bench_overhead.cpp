// What smp adds per microbatch and stage to the stage's own forward and backward in a plain loop: Linear(32) on 32 rows,
// messages of 4 KB. On one process nothing is sent; on two, each has a stage.
#include <torch/torch.h>

#include "benchmarks/measure.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;
namespace nn = torch::nn;

constexpr int64_t kRows = 32, kWidth = 32;
constexpr int kRounds = 201;

std::vector<nn::Linear> make_layers() {
  torch::manual_seed(3);
  std::vector<nn::Linear> layers;
  for (int i = 0; i < smp::size(); ++i) layers.emplace_back(kWidth, kWidth);
  return layers;
}

struct Net : nn::Module {
  Net() : layers(make_layers()) {
    for (size_t i = 0; i < layers.size(); ++i) {
      register_module("layer" + std::to_string(i), layers[i]);
      smp::set_partition(*layers[i], static_cast<int>(i));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  std::vector<nn::Linear> layers;
};

// One rank's part of the work as a user would write it by hand for one microbatch.
class PlainStage {
 public:
  PlainStage() : layer_(make_layers().at(static_cast<size_t>(smp::rank()))) {}

  void run(const at::Tensor& x, const at::Tensor& target) {
    const bool is_first = smp::rank() == 0, is_last = smp::rank() + 1 == smp::size();
    const at::Tensor input = is_first ? x : x.detach().requires_grad_();
    const at::Tensor output = layer_(input);
    if (is_last) {
      torch::mse_loss(output, target).backward();
    } else {
      output.backward(gradient_);
    }
  }

 private:
  nn::Linear layer_;
  at::Tensor gradient_ = torch::randn({kRows, kWidth});
};

// The largest over the ranks.
double slowest(double value) {
  auto values = torch::zeros({smp::size()}, torch::kDouble);
  values[smp::rank()] = value * smp::size();
  return smp::all_reduce_mean(values, smp::CommGroup::WORLD).max().item<double>();
}

// The losses of the plain loop over the whole model.
void check(const smp::StepOutput& losses, const at::Tensor& x, const at::Tensor& target) {
  auto layers = make_layers();
  for (int64_t m = 0; m < losses.size(); ++m) {
    at::Tensor y = x.slice(0, m * kRows, (m + 1) * kRows);
    for (auto& layer : layers) y = layer(y);
    const auto loss = torch::mse_loss(y, target.slice(0, m * kRows, (m + 1) * kRows));
    require(torch::equal(loss.detach(), losses[m]), "a loss differs from that of the plain loop");
  }
}

// Per slot of the table: a pipeline of n stages needs n - 1 slots more than it has microbatches.
void measure(const char* name, int64_t microbatches) {
  const auto x = torch::randn({microbatches * kRows, kWidth});
  const auto target = torch::randn({microbatches * kRows, kWidth});
  smp::DistributedModel model(std::make_shared<Net>());
  auto step = smp::step([&](at::Tensor input, at::Tensor output) {
    auto loss = torch::mse_loss(model(input), output);
    model.backward(loss);
    return loss;
  });
  const auto losses = step(x, target);
  if (smp::rank() == 0) check(losses, x, target);

  PlainStage stage;
  const auto rows = x.chunk(microbatches), wanted = target.chunk(microbatches);
  const auto plain = [&] {
    for (size_t m = 0; m < rows.size(); ++m) stage.run(rows[m], wanted[m]);
  };
  std::vector<double> extras, wholes, owns;
  const auto slots = static_cast<double>(microbatches + smp::size() - 1);
  for (int round = 0; round < kRounds; ++round) {
    smp::barrier();
    owns.push_back(1e6 * slowest(seconds_of(plain)) / static_cast<double>(microbatches));
    smp::barrier();
    wholes.push_back(1e6 * slowest(seconds_of([&] { step(x, target); })) / slots);
    extras.push_back(wholes.back() - owns.back());
  }
  if (smp::rank() != 0) return;
  report(
      name, median(extras), "us",
      {{"step us", median(wholes)}, {"plain loop us", median(owns)}, {"microbatches", static_cast<double>(microbatches)}});
}

}  // namespace

// bench_overhead [name [microbatches]]
int main(int argc, char** argv) {
  constexpr int64_t kMicrobatches = 64;  // twice what long pipelines use
  at::set_num_threads(1);
  smp::Config config;
  config.microbatches = argc > 2 ? std::stol(argv[2]) : kMicrobatches;
  config.auto_partition = false;
  config.log_level = smp::LogLevel::kOff;
  smp::init(config);
  const char* name = smp::size() > 1 ? "overhead_us_mpi_4k" : "overhead_us_local";
  require(is_wanted(argc, argv, name), std::string("on this many processes it measures ") + name);
  measure(name, config.microbatches);
  smp::shutdown();
}
