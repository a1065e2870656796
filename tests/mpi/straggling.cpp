// Two replicas of two stages, some of whose ranks do more than the others from step kFrom on, in their operators or between
// their steps: straggling own|others TOKEN. In `own` rank 3 computes longer, and rank 0 takes longer between its steps. In
// `others` it is rank 1 alone, for which each of the others waits in another call. Driven by stragglers_test.py.
#include <torch/torch.h>

#include <chrono>
#include <string_view>

#include "smp/smp.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kFrom = 12, kTo = 32, kMicrobatches = 2;
constexpr std::chrono::milliseconds kLong(200);  // six such steps take more than a second

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

/// Rank 0 in send, rank 2 in recv_from and rank 3 in allgather.
void wait_for_rank_1(const smp::ProcessGroup& ranks_1_and_3) {
  const int rank = smp::rank();
  if (rank == 0) smp::send(0, 1, smp::WORLD_RANK);
  if (rank == 2) smp::recv_from<int>(1, smp::WORLD_RANK);
  if (rank == 1) {
    smp::recv_from<int>(0, smp::WORLD_RANK);
    smp::send(0, 2, smp::WORLD_RANK);
  }
  if (ranks_1_and_3.is_member()) smp::allgather(rank, ranks_1_and_3);
}

}  // namespace

int main(int, char** argv) {
  const bool others_wait_in_calls = argv[1] == std::string_view("others");
  smp::init({.pipeline_parallel_degree = 2, .microbatches = kMicrobatches, .log_level = smp::LogLevel::kWarning});
  const smp::ProcessGroup ranks_1_and_3 = smp::new_group({1, 3});
  auto net = std::make_shared<Net>();
  smp::DistributedModel model(net);
  auto train_step = smp::step([&](at::Tensor x) {
    auto loss = model(x).square().mean();
    model.backward(loss);
    return loss;
  });
  const int slow_between = others_wait_in_calls ? 1 : 0;
  for (int step = 0; step < kTo; ++step) {
    const bool is_slow = step >= kFrom;
    if (is_slow && !others_wait_in_calls && smp::rank() == 3) in_operators = kLong / kMicrobatches;
    train_step(torch::ones({8, 16}));
    if (is_slow && smp::rank() == slow_between) work_for(kLong);
    if (others_wait_in_calls) wait_for_rank_1(ranks_1_and_3);
  }
  smp::shutdown();
}
