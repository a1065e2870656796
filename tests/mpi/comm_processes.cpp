// Objects and groups between processes, right and wrong. Driven by comm_processes_test.py; usage, under mpirun with four
// processes: comm_processes CASE TOKEN
#include <torch/torch.h>

#include <cstdio>
#include <future>
#include <map>
#include <set>
#include <string>

#include "smp/smp.h"

namespace {

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("expected ") + what);
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() && a.equal(b);
}

// Large enough to be sent in no single buffer of MPI's, and small, in turn.
void large_and_small() {
  const at::Tensor large = torch::arange(3'000'000, at::kLong).reshape({3000, 1000}).t();
  const int next = (smp::rank() + 1) % smp::size(), previous = (smp::rank() + smp::size() - 1) % smp::size();
  for (int round = 0; round < 3; ++round) {
    // Even ranks send first, so that nobody waits in a circle.
    for (const bool sends : {smp::rank() % 2 == 0, smp::rank() % 2 == 1}) {
      if (sends) {
        smp::send(large, next, smp::WORLD_RANK);
        smp::send(torch::full({2}, smp::rank(), at::kBFloat16), next, smp::WORLD_RANK);
      } else {
        expect(same(smp::recv_from<at::Tensor>(previous, smp::WORLD_RANK), large), "the large tensor");
        expect(same(smp::recv_from<at::Tensor>(previous, smp::WORLD_RANK), torch::full({2}, previous, at::kBFloat16)),
               "the small tensor");
      }
    }
  }
}

void groups() {
  const smp::ProcessGroup some = smp::new_group({3, 0, 2}), pair = smp::new_group({1, 2});
  for (int round = 0; round < 3; ++round) {
    if (some.is_member()) {
      expect(smp::allgather(smp::rank(), some) == std::vector<int>{3, 0, 2}, "the ranks of the group");
      if (smp::rank() == 3) {
        smp::broadcast(std::map<std::string, int>{{"round", round}}, some);
      } else {
        const auto map = smp::recv_from<std::map<std::string, int>>(3, smp::WORLD_RANK);
        expect(map.at("round") == round, "the round");
      }
    }
    if (pair.is_member()) {
      const auto mean = smp::all_reduce_mean(torch::full({2}, smp::rank(), at::kDouble), pair);
      expect(mean[1].item<double>() == 1.5, "the mean of ranks 1 and 2");
    }
    smp::barrier();
  }
  for (int i = 0; i < 200; ++i) {  // each is freed when the next is made
    const smp::ProcessGroup three = smp::new_group({3, 1, 0});
    if (three.is_member()) expect(smp::allgather(i, three) == std::vector<int>(3, i), "one number from three ranks");
  }
}

// The others do nothing until the rank that a case is about ends the job: their own time is never up before.
void wait_for_the_failure() {
  std::promise<void> never;
  never.get_future().wait();
}

void broadcast_in_another_group() {
  // Pipelines {0, 1} {2, 3}: rank 2 waits for a replica that spoke to its own pipeline.
  if (smp::rank() == 0) smp::broadcast(1, smp::PP_GROUP);
  if (smp::rank() == 1) smp::recv_from<int>(0, smp::PP_RANK);
  if (smp::rank() == 2) smp::recv_from<int>(0, smp::DP_RANK);
  wait_for_the_failure();
}

void send_without_receiver() {
  if (smp::rank() == 0) smp::send(1, 3, smp::WORLD_RANK);
  wait_for_the_failure();
}

void barrier_without_partner() {
  if (smp::rank() == 0) smp::pp_barrier();
  wait_for_the_failure();
}

void different_calls() {
  if (smp::rank() == 3) smp::barrier();
  smp::allgather(1, smp::WORLD);
}

void another_type() {
  if (smp::rank() == 0) smp::send(1.5, 1, smp::WORLD_RANK);
  if (smp::rank() == 1) smp::recv_from<std::string>(0, smp::WORLD_RANK);
  smp::barrier();
}

void outsider() {
  const smp::ProcessGroup some = smp::new_group({0, 1, 2});
  smp::barrier(some);
}

void different_lists() { smp::new_group({0, smp::rank() == 3 ? 2 : 1}); }

const std::map<std::string, void (*)()> kCases{
    {"large_and_small", large_and_small},
    {"groups", groups},
    {"broadcast_in_another_group", broadcast_in_another_group},
    {"send_without_receiver", send_without_receiver},
    {"barrier_without_partner", barrier_without_partner},
    {"different_calls", different_calls},
    {"another_type", another_type},
    {"outsider", outsider},
    {"different_lists", different_lists},
};
const std::set<std::string> kTimedOut{"broadcast_in_another_group", "send_without_receiver", "barrier_without_partner"};

}  // namespace

int main(int, char** argv) {
  const std::string name = argv[1];
  const double timeout_s = kTimedOut.contains(name) ? 0.6 : 60;
  smp::init({.pipeline_parallel_degree = 2, .timeout_s = timeout_s, .log_level = smp::LogLevel::kOff});
  kCases.at(name)();
  smp::shutdown();
  std::printf("done\n");
}
