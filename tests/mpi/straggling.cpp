// Two replicas of two stages, one of whose ranks does more than the others from step kFrom on, in its operators or between
// its steps: straggling RANK computing|between|recv_from|send|allgather TOKEN; behind its steps all others wait for it in
// the call that is named. Driven by stragglers_test.py.
#include <torch/torch.h>

#include <chrono>
#include <string_view>

#include "smp/smp.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kFrom = 12, kTo = 32;
constexpr auto kLong = std::chrono::milliseconds(200);  // six such steps take more than a second

std::chrono::milliseconds in_operators{0};

void work_for(std::chrono::milliseconds time) {
  const at::Tensor square = torch::ones({96, 96});
  for (const auto begin = Clock::now(); Clock::now() - begin < time;) square.mm(square);
}

at::Tensor with_work(at::Tensor x) {
  work_for(in_operators);
  return x.clone();
}

struct Net : torch::nn::Module {
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : *layers) x = smp::opaque([](at::Tensor y) { return with_work(y); }, layer.forward(x));
    return x;
  }
  torch::nn::Sequential layers =
      register_module("layers", torch::nn::Sequential(torch::nn::Linear(16, 16), torch::nn::Linear(16, 16)));
};

/// All ranks but `slow` wait for it in `call`, if that is one.
void wait_for(int slow, std::string_view call) {
  const bool others_send = call == "send";
  if (call == "allgather") smp::allgather(smp::rank(), smp::CommGroup::WORLD);
  if (!others_send && call != "recv_from") return;
  for (int other = 0; other < smp::size(); ++other) {
    const bool is_slow = smp::rank() == slow;
    if (other == slow || (!is_slow && smp::rank() != other)) continue;
    const int peer = is_slow ? other : slow;
    if (is_slow == others_send)
      smp::recv_from<int>(peer, smp::WORLD_RANK);
    else
      smp::send(0, peer, smp::WORLD_RANK);
  }
}

}  // namespace

int main(int, char** argv) {
  const int slow = std::stoi(argv[1]);
  const std::string_view where = argv[2];
  std::chrono::milliseconds between{0};
  smp::init({.pipeline_parallel_degree = 2, .microbatches = 2, .log_level = smp::LogLevel::kWarning});
  auto net = std::make_shared<Net>();
  smp::DistributedModel model(net);
  auto train_step = smp::step([&](at::Tensor x) {
    auto loss = model(x).square().mean();
    model.backward(loss);
    return loss;
  });
  for (int step = 0; step < kTo; ++step) {
    if (step == kFrom && smp::rank() == slow) (where == "computing" ? in_operators : between) = kLong;
    train_step(torch::ones({8, 16}));
    work_for(between);
    wait_for(slow, where);
  }
  smp::shutdown();
}
