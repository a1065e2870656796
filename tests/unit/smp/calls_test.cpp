// Ranks in different calls: an error with both names on both sides, and nothing of one taken for the other.
#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "runtime/transport/error.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;

/// What a rank has to call.
struct Job {
  std::shared_ptr<tests::SmallNet> net = make_net();
  DistributedModel<tests::SmallNet> model{net};
  DistributedOptimizer<torch::optim::SGD> optimizer{torch::optim::SGD(net->parameters(), 0.1), model};
  decltype(step(std::function<at::Tensor(at::Tensor)>())) train = step(std::function<at::Tensor(at::Tensor)>([this](auto x) {
    at::Tensor loss = model(x).pow(2).mean();
    model.backward(loss);
    return loss;
  }));

  void train_once() { train(rows(4, 8, 1)); }
};

using Part = std::function<void(Job&)>;

// What the ranks of a job throw, each of which has a part of its own.
std::vector<std::string> failures(int num_ranks, const Config& config, const std::vector<Part>& parts) {
  std::vector<std::string> texts(static_cast<size_t>(num_ranks));
  run_smp_ranks(num_ranks, config, [&] {
    const auto own = static_cast<size_t>(rank());
    try {
      Job job;
      job.train_once();  // in which some still are when others fail
      parts.at(own)(job);
      barrier();
    } catch (const c10::Error& error) {
      texts[own] = error.what_without_backtrace();
    } catch (const CommError& error) {
      texts[own] = error.what();
    }
  });
  return texts;
}

struct Call {
  const char* name;
  Part make;
};

const std::vector<Call>& calls() {
  static const std::vector<Call> all{
      {"step", [](Job& job) { job.train_once(); }},
      {"state_dict", [](Job& job) { job.model.state_dict(); }},
      {"state_dict of an optimizer", [](Job& job) { job.optimizer.state_dict(); }},
      {"load_state_dict", [](Job& job) { job.model.load_state_dict(StateDict()); }},
      {"clip_grad_norm_", [](Job& job) { clip_grad_norm_(job.model, 1.0); }},
      {"save_state", [](Job& job) { save_state("/proc/no_folder", job.model, job.optimizer); }},
      {"load_state", [](Job& job) { load_state("/proc/no_folder", job.model, job.optimizer); }},
      {"barrier of WORLD", [](Job&) { barrier(); }},
      {"barrier of PP_GROUP", [](Job&) { pp_barrier(); }},
      {"allgather of WORLD", [](Job&) { allgather(1, WORLD); }},
      {"all_reduce_mean of WORLD", [](Job&) { all_reduce_mean(torch::ones({2}), WORLD); }},
      {"new_group", [](Job&) { new_group({0, 1}); }},
      {"of an object from rank 0 to rank 1",
       [](Job&) { rank() == 0 ? broadcast(1, WORLD) : void(recv_from<int>(0, WORLD_RANK)); }},
      {"of an object from rank 1 to rank 0",
       [](Job&) { rank() == 1 ? send(1, 0, WORLD_RANK) : void(recv_from<int>(1, WORLD_RANK)); }},
  };
  return all;
}

TEST(DifferentCalls, OfTwoRanksAreNamedOnBoth) {
  for (const Call& first : calls()) {
    for (const Call& second : calls()) {
      if (&first == &second) continue;
      SCOPED_TRACE(std::string(first.name) + ", " + second.name);
      for (const std::string& text : failures(2, {.microbatches = 2}, {first.make, second.make})) {
        EXPECT_TRUE(contains(text, "expected every rank to make the same calls in the same order")) << text;
        EXPECT_TRUE(contains(text, first.name) && contains(text, second.name)) << text;
      }
    }
  }
}

TEST(DifferentCalls, AreStepsOfOtherNumbers) {
  const auto train = [](int times) {
    return [times](Job& job) {
      for (int i = 0; i < times; ++i) job.train_once();
    };
  };
  for (const auto& [first, second] : {std::pair(3, 2), std::pair(2, 3)}) {
    for (const std::string& text : failures(2, {.microbatches = 2}, {train(first), train(second)})) {
      EXPECT_TRUE(contains(text, "step on rank") && contains(text, "barrier of WORLD on rank")) << text;
    }
  }
}

// Pipelines {0, 1} {2, 3}, replicas {0, 2} {1, 3}.
TEST(DifferentCalls, AmongReplicasAreNamed) {
  const Part nothing = [](Job&) {}, train = calls()[0].make, state = calls()[1].make;
  const Part replicas = [](Job&) { dp_barrier(); };
  const Config config{.pipeline_parallel_degree = 2, .microbatches = 2};
  const auto expect_named = [&](const std::vector<Part>& parts, const char* one, const char* other) {
    for (const std::string& text : failures(4, config, parts)) {
      EXPECT_TRUE(contains(text, one) && contains(text, other)) << text;
    }
  };
  expect_named({train, train, train, replicas}, "step", "barrier of DP_GROUP on rank 3");
  expect_named({train, replicas, train, train}, "step", "barrier of DP_GROUP on rank 1");
  expect_named({replicas, train, train, train}, "step", "barrier of DP_GROUP on rank 0");
  expect_named({train, train, train, [](Job&) { allgather(1, WORLD); }}, "step on rank", "allgather of WORLD on rank 3");
  expect_named({nothing, nothing, nothing, state}, "barrier of WORLD on rank 2", "state_dict on rank 3");
  expect_named({train, train, nothing, nothing}, "step on rank", "barrier of WORLD on rank");
}

TEST(DifferentCalls, OfGroupsThatHaveNoRankInCommonAreAllowed) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    Job job;
    for (int i = 0; i < 3; ++i) {
      job.train_once();
      if (dp_rank() == 0) job.model.state_dict();
      if (dp_rank() == 1) pp_barrier(), allgather(1, PP_GROUP);
      const ProcessGroup ends = new_group({0, 3});
      if (ends.is_member()) barrier(ends);
    }
  });
}

}  // namespace
}  // namespace smp
