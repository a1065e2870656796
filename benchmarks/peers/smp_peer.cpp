// One side of a comparison with peers: trains a model with smp and tells how long a step takes, whenever it is asked to.
//
//   smp run -np 2 smp_peer lm-small 8 pipeline
//
// Reads lines "N" on the first process: N steps, answered by the seconds of each in one line. Ends with its input.
#include <torch/torch.h>

#include <iostream>
#include <optional>
#include <sstream>

#include "benchmarks/measure.h"
#include "benchmarks/peers/models.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;

class Training {
 public:
  /// `shares`: each replica takes its part of the batch, rather than smp.
  Training(PeerModel made, bool shares) : made_(std::move(made)), model_(made_.net) {
    if (!shares) return;
    made_.x = made_.x.chunk(smp::dp_size())[static_cast<size_t>(smp::dp_rank())].clone();
    made_.y = made_.y.chunk(smp::dp_size())[static_cast<size_t>(smp::dp_rank())].clone();
  }

  smp::StepOutput step() {
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
    smp::StepOutput losses = step_(made_.x, made_.y);
    num_microbatches_ = static_cast<int64_t>(losses.size());
    return losses;
  }

  // In evaluation, where nothing is random, the losses are those of the plain loop.
  void check(PeerModel& plain, int64_t microbatches, int64_t num_steps) {
    const at::NoGradGuard no_grad;
    const auto x = plain.x.chunk(microbatches), y = plain.y.chunk(microbatches);
    for (int64_t i = 0; i < num_steps * microbatches; ++i) {  // statistics of norms
      plain.net->forward(x[static_cast<size_t>(i % microbatches)]);
    }
    model_.eval();
    plain.net->eval();
    auto evaluation = smp::step([this](at::Tensor a, at::Tensor b) { return made_.loss(model_(a), b); });
    const auto losses = evaluation(made_.x, made_.y);
    for (int64_t m = 0; m < losses.size(); ++m) {
      const auto part = static_cast<size_t>(m);
      const at::Tensor want = plain.loss(plain.net->forward(x[part].clone()), y[part].clone()).detach();
      require(torch::allclose(losses[m], want, 1e-5), "a loss differs from that of the plain loop");
    }
    model_.train();
  }

  double predicted_step_s() const { return model_.predicted_step_s(); }
  std::string layout() const {
    return std::to_string(smp::dp_size()) + "x" + std::to_string(smp::pp_size()) + "x" + std::to_string(num_microbatches_);
  }

 private:
  PeerModel made_;
  int64_t num_microbatches_ = 0;
  std::vector<at::Tensor> parameters_ = made_.net->parameters();
  smp::DistributedModel<PeerNet> model_;
  smp::Step<std::function<at::Tensor(at::Tensor, at::Tensor)>> step_{[this](at::Tensor x, at::Tensor y) {
    const at::Tensor loss = made_.loss(model_(x), y);
    model_.backward(loss);
    return loss;
  }};
};

// From the last process that begins to the last that ends: the clock is one on a host.
double seconds_together(Training& training) {
  smp::barrier();
  const double begin = seconds_now();
  training.step();
  const double end = seconds_now();
  double last_begin = begin, last_end = end;
  for (const at::Tensor& times : smp::allgather(torch::tensor({begin, end}, torch::kDouble), smp::WORLD)) {
    last_begin = std::max(last_begin, times[0].item<double>());
    last_end = std::max(last_end, times[1].item<double>());
  }
  return last_end - last_begin;
}

// Number of steps that are wanted, on every process; 0: the predicted seconds of one. None: the end.
std::optional<int64_t> next_request() {
  constexpr int64_t kEnd = -1;
  int64_t count = kEnd;
  if (smp::rank() == 0) {
    std::string line;
    if (std::getline(std::cin, line)) count = std::stol(line);
    smp::broadcast(count, smp::WORLD);
  } else {
    count = smp::recv_from<int64_t>(0, smp::WORLD_RANK);
  }
  return count == kEnd ? std::nullopt : std::optional(count);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  require(argc == 4, "expected a model, a number of microbatches (or auto), and pipeline, replicas or auto");
  const std::string name = argv[1], number = argv[2], layout = argv[3];
  smp::Config config;
  config.microbatches = number == "auto" ? smp::kAutoMicrobatches : std::stol(number);
  if (layout == "replicas") config.pipeline_parallel_degree = 1;
  if (layout == "auto") config.parallelism = smp::Parallelism::kAuto;
  config.virtual_stages = smp::kAutoVirtualStages;
  config.cost = smp::CostSource::kMeasured;
  config.cost_cache = "off";
  config.log_level = smp::LogLevel::kOff;
  config.timeout_s = 24 * 3600;  // stopped most of the time
  smp::init(config);
  Training training(make_peer_model(name), layout == "replicas");
  constexpr int64_t kWarmUp = 4;
  for (int64_t i = 0; i < kWarmUp; ++i) training.step();
  if (layout == "pipeline") {
    PeerModel plain = make_peer_model(name);
    training.check(plain, config.microbatches, kWarmUp);
  }
  if (smp::rank() == 0) std::cout << "ready " << training.layout() << std::endl;
  while (const std::optional<int64_t> count = next_request()) {
    std::ostringstream answer;
    if (*count == 0) answer << training.predicted_step_s();
    for (int64_t i = 0; i < *count; ++i) answer << seconds_together(training) << ' ';
    if (smp::rank() == 0) std::cout << answer.str() << std::endl;
  }
  smp::shutdown();
}
