// Gradients of replicas: buckets on their way during the backward, steps that keep them, hooks, unused parameters.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "smp/engine/models/models.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::expect_close;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Gradients = std::map<std::string, at::Tensor>;

struct Run {
  int stages = 1;
  ModelOptions options{};
  CommHook hook{};
};

// Gradients of one step after two steps that leave theirs, on 4 ranks.
Gradients gradients_of(const Run& run, const std::function<void(DistributedModel<SmallNet>&, int step)>& before = {}) {
  std::mutex mutex;
  Gradients all;
  run_smp_ranks(4, {.pipeline_parallel_degree = run.stages, .microbatches = 3, .seed = 9}, [&] {
    const auto net = make_net(at::kFloat, 0.3);
    DistributedModel<SmallNet> model(net, run.options);
    if (run.hook) model.register_comm_hook(run.hook);
    auto step = tests::training_step(model);
    for (int s = 0; s < 3; ++s) {
      if (before) before(model, s);
      step(rows(6, 8, 10 * s + dp_rank()), rows(6, 4, 100 + 10 * s + dp_rank()));
    }
    const std::lock_guard lock(mutex);
    for (const auto& [name, tensor] : model.local_named_parameters()) {
      if (all.contains(name)) expect_bit_equal(tensor.grad(), all[name], "two replicas' " + name);
      all[name] = tensor.grad().clone();
    }
  });
  return all;
}

TEST(DataParallel, OverlappedGivesTheSameBitsAsNotOverlapped) {
  for (const int stages : {1, 2, 4}) {
    const Gradients overlapped = gradients_of({.stages = stages});
    EXPECT_EQ(overlapped.size(), 8);
    expect_bit_equal(gradients_of({.stages = stages, .options = {.overlapping_allreduce = false}}), overlapped, "gradient");
  }
}

// When the first bucket leaves, gradients of the parameters that a backward comes to last are still to be made.
TEST(DataParallel, BucketsLeaveWhileATapeRuns) {
  for (const bool overlaps : {true, false}) {
    run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 1, .stage = StageKind::kTape}, [&] {
      const auto net = make_net();
      DistributedModel<SmallNet> model(net, {.overlapping_allreduce = overlaps});
      ModelAccess::of(model).reduction.bucket_bytes = 64;
      const std::vector<at::Tensor> parameters = net->parameters();
      size_t num_made = 0;  // when the first bucket leaves
      model.register_comm_hook([&](const GradientBucket& bucket) {
        if (bucket.index == 0) {
          num_made = static_cast<size_t>(std::count_if(
              parameters.begin(), parameters.end(), [](const at::Tensor& parameter) { return parameter.grad().defined(); }));
        }
        return all_reduce_mean(bucket.gradients);
      });
      auto step = tests::training_step(model);
      for (int s = 0; s < support::kStepsToTape; ++s) {
        net->zero_grad();
        step(rows(6, 8, 10 * s), rows(6, 4, 100 + 10 * s));
      }
      for (const auto& report : support::stage_reports()) EXPECT_GT(report.num_taped, 0) << report.stays_on_autograd;
      EXPECT_EQ(num_made < parameters.size(), overlaps) << num_made;
    });
  }
}

TEST(DataParallel, AHookThatTakesTheMeanChangesNothing) {
  const CommHook mean = [](const GradientBucket& bucket) { return all_reduce_mean(bucket.gradients); };
  expect_bit_equal(gradients_of({.stages = 2, .hook = mean}), gradients_of({.stages = 2}), "gradient");
}

TEST(DataParallel, Bf16HookIsCloseAndNotEqual) {
  const Gradients want = gradients_of({.stages = 2}), got = gradients_of({.stages = 2, .hook = bf16_compress_hook});
  expect_close(got, want, 2e-2, "gradient");
  EXPECT_GT(support::relative_difference(got.at("first.weight"), want.at("first.weight")), 1e-6);
}

TEST(DataParallel, RefusesWhatAHookReturnsInAnotherShape) {
  const CommHook wrong = [](const GradientBucket& bucket) { return bucket.gradients.narrow(0, 0, 1).clone(); };
  EXPECT_TRUE(contains(message_of([&] { gradients_of({.hook = wrong}); }), "expected a tensor like the bucket"));
}

TEST(DataParallel, SumsOverMicrobatchesWhereAsked) {
  Gradients want = gradients_of({.stages = 2});
  for (auto& [name, gradient] : want) gradient = gradient * 3;
  expect_close(gradients_of({.stages = 2, .options = {.average_grads_across_microbatches = false}}), want, 1e-5, "gradient");
}

// Steps that keep their gradients give, after one that does not, the mean over replicas of the sums over steps.
TEST(DataParallel, NoSyncAndBackwardPassesPerStepAverageTheSums) {
  for (const int stages : {1, 2}) {
    const Gradients want = gradients_of({.stages = stages});
    std::mutex mutex;
    std::map<int, std::unique_ptr<NoSync>> guards;
    const auto guarded = [&](DistributedModel<SmallNet>& model, int step) {
      const std::lock_guard lock(mutex);
      if (step == 0) guards[rank()] = std::make_unique<NoSync>(model);
      if (step == 2) guards.erase(rank());
    };
    expect_close(gradients_of({.stages = stages}, guarded), want, 1e-5, "under NoSync");
    expect_close(gradients_of({.stages = stages, .options = {.backward_passes_per_step = 3}}), want, 1e-5, "every third");
  }
}

TEST(DataParallel, StepsThatKeepTheirGradientsDifferBetweenReplicas) {
  EXPECT_TRUE([] {
    bool differ = false;
    run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 1}, [&] {
      const auto net = make_net();
      DistributedModel<SmallNet> model(net);
      auto step = tests::training_step(model);
      const NoSync guard(model);
      step(rows(4, 8, dp_rank()), rows(4, 4, dp_rank()));
      const at::Tensor own = net->first->weight.grad();
      const bool is_own = support::relative_difference(own, all_reduce_mean(own)) > 1e-3;
      if (rank() == 0) differ = is_own;
    });
    return differ;
  }());
}

TEST(DataParallel, RefusesReplicasOfWhichOneKeepsItsGradients) {
  const auto one_keeps = [] {
    run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 1}, [&] {
      const auto net = make_net();
      DistributedModel<SmallNet> model(net);
      auto step = tests::training_step(model);
      std::optional<NoSync> guard;
      if (rank() == 1) guard.emplace(model);
      step(rows(4, 8, 1), rows(4, 4, 1));
    });
  };
  const std::string text = message_of<c10::ValueError>(one_keeps);
  EXPECT_TRUE(contains(text, "gradients averaged on replica 0") && contains(text, "gradients kept on replica 1")) << text;
}

/// One of two branches by a flag that replicas may set differently.
struct Branches : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(takes_left ? left(x) : right(x)); }
  bool takes_left = true;
  torch::nn::Linear left = register_module("left", torch::nn::Linear(8, 8));
  torch::nn::Linear right = register_module("right", torch::nn::Linear(8, 8));
  torch::nn::Linear never = register_module("never", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
};

TEST(DataParallel, AParameterThatOneReplicaUsesIsAveragedWithZeros) {
  for (const bool overlap : {true, false}) {
    run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 2}, [&] {
      const auto net = std::make_shared<Branches>(), twin = std::make_shared<Branches>();
      tests::fill(*net), tests::fill(*twin);
      DistributedModel<Branches> model(net, {.overlapping_allreduce = overlap});
      auto step = tests::training_step(model);
      step(rows(4, 8, 1), rows(4, 4, 1));  // the first step is the same on all replicas
      model.zero_grad();
      net->takes_left = dp_rank() == 0;
      step(rows(4, 8, 2), rows(4, 4, 2));
      for (const bool left : {true, false}) {
        twin->takes_left = left;
        tests::eager_step(*twin, rows(4, 8, 2), rows(4, 4, 2), 2);
      }
      expect_close(net->left->weight.grad(), twin->left->weight.grad() / 2, 1e-6, "left");
      expect_close(net->right->weight.grad(), twin->right->weight.grad() / 2, 1e-6, "right");
      EXPECT_FALSE(net->never->weight.grad().defined());
    });
  }
}

TEST(DataParallel, RefusesOptionsThatMeanNothing) {
  run_smp_ranks(1, {}, [] {
    const auto net = make_net();
    EXPECT_THROW(DistributedModel<SmallNet>(net, {.bucket_cap_mb = -1}), c10::ValueError);
    EXPECT_THROW(DistributedModel<SmallNet>(net, {.backward_passes_per_step = 0}), c10::ValueError);
    DistributedModel<SmallNet> model(net);
    EXPECT_THROW(DistributedModel<SmallNet>(make_net(), {.average_grads_across_microbatches = false}), c10::ValueError);
  });
}

}  // namespace
}  // namespace smp
