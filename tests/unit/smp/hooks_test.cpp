// Hooks: when they are called, on which ranks, and what an exception in one does.
#include <gtest/gtest.h>

#include <mutex>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;
using Calls = std::vector<std::string>;

TEST(Hooks, AreCalledInTheirOrderOnEveryRank) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    const auto net = make_net();
    Model model(net);
    auto step = tests::training_step(model);
    Calls calls;
    model.register_step_post_hook([&] { calls.push_back("step post"); });
    model.register_post_step_hook([&] { calls.push_back("post step"); });
    model.register_step_pre_hook([&] { calls.push_back("step pre"); });
    model.register_step_pre_hook([&] { calls.push_back("step pre 2"); });
    model.register_pre_partition_hook([&] {
      EXPECT_FALSE(model.partitioned());
      calls.push_back("pre partition");
    });
    model.register_post_partition_hook([&] {
      EXPECT_TRUE(model.partitioned());
      EXPECT_FALSE(net->first->weight.grad().defined());
      EXPECT_LT(model.local_parameters().size(), net->parameters().size());
      calls.push_back("post partition");
    });
    EXPECT_EQ(calls, Calls());
    step(rows(4, 8, 1), rows(4, 4, 2));
    EXPECT_EQ(calls, (Calls{"step pre", "step pre 2", "pre partition", "post partition", "post step", "step post"}));
    calls.clear();
    step(rows(4, 8, 1), rows(4, 4, 2));
    EXPECT_EQ(calls, (Calls{"step pre", "step pre 2", "step post"}));
  });
}

TEST(Hooks, MayCommunicateAndChangeParameters) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    auto step = tests::training_step(model);
    const auto halve = [](torch::nn::Module& module, const std::vector<at::Tensor>& parameters) {
      (void)module;
      const at::NoGradGuard no_grad;
      for (at::Tensor parameter : parameters) parameter.mul_(0.5);
    };
    model.register_post_partition_hook([&] {
      halve(*net, model.local_parameters());
      EXPECT_EQ(allgather(rank(), WORLD).size(), 4u);
      EXPECT_EQ(model.state_dict().entries.size(), net->parameters().size());
    });
    halve(*twin, twin->parameters());
    const StepOutput loss = step(rows(4, 8, 1), rows(4, 4, 2));
    expect_bit_equal(loss.outputs(), tests::eager_step(*twin, rows(4, 8, 1), rows(4, 4, 2), 2), "loss");
  });
}

TEST(Hooks, AreRemovedByTheirHandlesAlsoFromWithinAHook) {
  run_smp_ranks(1, {}, [] {
    Model model(make_net());
    auto step = tests::training_step(model);
    int first = 0, second = 0, third = 0;
    HookHandle handle = model.register_step_pre_hook([&] { ++first; });
    HookHandle later;
    HookHandle own = model.register_step_pre_hook([&] {
      ++second;
      own.remove();
      later.remove();
      model.register_step_post_hook([&] { ++third; });
    });
    later = model.register_step_pre_hook([&] { ADD_FAILURE() << "was removed before its turn"; });
    step(rows(4, 8, 1), rows(4, 4, 2));
    handle.remove();
    handle.remove();
    step(rows(4, 8, 1), rows(4, 4, 2));
    EXPECT_EQ(first, 1);
    EXPECT_EQ(second, 1);
    EXPECT_EQ(third, 2);
  });
}

TEST(Hooks, AfterARefusedStepThePostHooksAreNotCalled) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    Model model(make_net());
    auto step = tests::training_step(model);
    Calls calls;
    model.register_step_pre_hook([&] { calls.push_back("pre"); });
    model.register_step_post_hook([&] { calls.push_back("post"); });
    model.register_post_step_hook([&] { calls.push_back("first"); });
    EXPECT_THROW(step(rows(3, 8, 1), rows(3, 4, 2)), c10::ValueError);
    EXPECT_EQ(calls, Calls{"pre"});
    step(rows(4, 8, 1), rows(4, 4, 2));
    EXPECT_EQ(calls, (Calls{"pre", "pre", "first", "post"}));
  });
}

TEST(Hooks, AreRefusedWhereTheyWouldNeverBeCalled) {
  run_smp_ranks(1, {}, [] {
    Model model(make_net());
    auto step = tests::training_step(model);
    EXPECT_TRUE(
        contains(message_of([&] { model.register_step_pre_hook(nullptr); }), "expected a function, got an empty one"));
    step(rows(4, 8, 1), rows(4, 4, 2));
    EXPECT_TRUE(contains(message_of([&] { model.register_pre_partition_hook([] {}); }),
                         "register_pre_partition_hook: expected a call before the first step"));
    EXPECT_TRUE(contains(message_of([&] { model.register_post_partition_hook([] {}); }), "before the first step"));
    EXPECT_TRUE(contains(message_of([&] { model.register_post_step_hook([] {}); }), "before the first step has ended"));
    EXPECT_NO_THROW(model.register_step_pre_hook([] {}));
  });
}

TEST(Hooks, ABodyRegistersNoneAndAHookCallsNoStep) {
  run_smp_ranks(1, {}, [] {
    Model model(make_net());
    auto registers = smp::step([&](at::Tensor data) {
      model.register_step_post_hook([] {});
      return model(data);
    });
    EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { registers(rows(4, 8, 1)); }),
                         "register_step_post_hook: expected a call outside of step bodies"));
  });
  const std::string message = message_of([] {
    run_smp_ranks(1, {}, [] {
      Model model(make_net());
      auto step = smp::step([&](at::Tensor data) { return model(data); });
      model.register_step_pre_hook([&] { step(rows(4, 8, 1)); });
      step(rows(4, 8, 1));
    });
  });
  EXPECT_TRUE(contains(message, "step: expected a call outside of hooks, got one from within a hook")) << message;
}

TEST(Hooks, OfSeveralModelsComeWithTheirOwnPartition) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    Model first(make_net()), second(make_net());
    Calls calls;
    for (auto& [model, name] : {std::pair{&first, "first"}, std::pair{&second, "second"}}) {
      const auto note = [&calls, called = std::string(name)](const std::string& moment) {
        return [&calls, called, moment] { calls.push_back(called + " " + moment); };
      };
      model->register_pre_partition_hook(note("before"));
      model->register_post_partition_hook(note("after"));
      model->register_post_step_hook(note("stepped"));
    }
    auto one = tests::training_step(first);
    auto other = tests::training_step(second);
    one(rows(4, 8, 1), rows(4, 4, 2));
    EXPECT_EQ(calls, (Calls{"first before", "first after", "first stepped"}));
    calls.clear();
    other(rows(4, 8, 1), rows(4, 4, 2));
    one(rows(4, 8, 1), rows(4, 4, 2));
    EXPECT_EQ(calls, (Calls{"second before", "second after", "second stepped"}));
  });
}

enum class When { kStepPre, kPrePartition, kPostPartition, kPostStep, kStepPost };

class ThrowingHook : public testing::TestWithParam<When> {};

TEST_P(ThrowingHook, EndsTheStepOnEveryRankWithItsText) {
  std::mutex mutex;
  std::vector<std::string> texts(4);
  const auto run = [&] {
    Model model(make_net());
    auto step = tests::training_step(model);
    const auto hook = [] {
      if (rank() == 2) throw std::runtime_error("the hook of rank 2 found no file");
    };
    switch (GetParam()) {
      case When::kStepPre:
        model.register_step_pre_hook(hook);
        break;
      case When::kPrePartition:
        model.register_pre_partition_hook(hook);
        break;
      case When::kPostPartition:
        model.register_post_partition_hook(hook);
        break;
      case When::kPostStep:
        model.register_post_step_hook(hook);
        break;
      case When::kStepPost:
        model.register_step_post_hook(hook);
        break;
    }
    barrier();  // no rank is still making its model when another one fails
    try {
      step(rows(4, 8, 1), rows(4, 4, 2));
      barrier();  // the others have ended their step before rank 2's hook after it
    } catch (const std::exception& error) {
      const std::lock_guard<std::mutex> lock(mutex);
      texts[static_cast<size_t>(rank())] = error.what();
      throw;
    }
  };
  const Config config{.pipeline_parallel_degree = 2, .microbatches = 2};
  EXPECT_THROW(run_smp_ranks(4, config, run), std::exception);  // of whichever rank is the first
  for (size_t r = 0; r < 4; ++r) EXPECT_TRUE(contains(texts[r], "the hook of rank 2 found no file")) << r << texts[r];
}

INSTANTIATE_TEST_SUITE_P(Moments, ThrowingHook,
                         testing::Values(When::kStepPre, When::kPrePartition, When::kPostPartition, When::kPostStep,
                                         When::kStepPost));

}  // namespace
}  // namespace smp
