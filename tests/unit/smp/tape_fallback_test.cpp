// What is not taped, and what makes a tape go: the numbers stay those of the loop without smp, and the reason is told.
#include <gtest/gtest.h>
#include <torch/library.h>

#include <atomic>

#include "smp/detail/conductor.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using runtime::StageReport;
using support::expect_bit_equal;
using tests::rows;
using tests::SmallNet;

std::atomic<int64_t> num_calls = 0;
std::atomic<bool> has_memory = false;

// A kernel that LibTorch would not ship: x + k in its k-th call.
at::Tensor counted(const at::Tensor& x) { return x + (has_memory ? static_cast<double>(++num_calls) : 0.0); }

TORCH_LIBRARY_IMPL(aten, CPU, library) { library.impl("special_i1e", counted); }

TORCH_LIBRARY(tape_test, library) {
  library.def("counted(Tensor x) -> Tensor");
  library.impl("counted", c10::DispatchKey::CPU, counted);
  library.impl("counted", c10::DispatchKey::Meta, [](const at::Tensor& x) { return at::empty_like(x); });
}

at::Tensor call_counted(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tape_test::counted", "").typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

StageReport report() {
  const auto& stages = detail::conductor("test").models().all().front()->first_program->rank_program.stages;
  EXPECT_EQ(stages.size(), 1U);
  return stages.begin()->second->report();
}

// Trains a SmallNet and its plain twin, `change` in between.
void expect_twins_after(int steps, const std::function<void(int, SmallNet&)>& change,
                        const std::function<void()>& look = [] {}) {
  tests::run_smp_ranks(1, {.microbatches = 2, .stage = StageKind::kTape, .log_level = LogLevel::kOff}, [&] {
    const auto net = tests::make_net(), twin = tests::make_net();
    DistributedModel model(net);
    auto step = tests::training_step(model);
    for (int s = 0; s < steps; ++s) {
      change(s, *net);
      change(s, *twin);
      const at::Tensor data = rows(8, 8, 10 + s), target = rows(8, 4, 20 + s);
      const std::string what = "step " + std::to_string(s);
      expect_bit_equal(step(data, target).outputs(), tests::eager_step(*twin, data, target, 2), what);
      tests::expect_twins(model, *twin, what);
    }
    look();
  });
}

TEST(TapeFallback, AStageIsTapedAfterTwoSteps) {
  expect_twins_after(3, [](int, SmallNet&) {}, [] {
    EXPECT_EQ(report().num_taped, 2);
    EXPECT_EQ(report().stays_on_autograd, "");
    EXPECT_GT(report().num_backward_calls, report().num_forward_calls);
  });
}

// Trains with one more term in the loss, and returns how the stage ran.
StageReport train_with(const std::function<at::Tensor(const at::Tensor&)>& term) {
  StageReport got;
  tests::run_smp_ranks(1, {.microbatches = 2, .stage = StageKind::kTape, .log_level = LogLevel::kOff}, [&] {
    const auto net = tests::make_net(), twin = tests::make_net();
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean() + term(data).mean();
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < 3; ++s) {
      const at::Tensor data = rows(8, 8, s);
      step(data);
      for (const auto& part : data.chunk(2)) (twin->forward(part.clone()).square().mean() / 2).backward();
      tests::expect_twins(model, *twin, "step " + std::to_string(s));
    }
    got = report();
  });
  return got;
}

// The term has no gradient, so those of the loop without it are wanted, each once.
TEST(TapeFallback, OtherBitsAreNoticedAndAutogradStays) {
  has_memory = true;
  const StageReport got = train_with([](const at::Tensor& x) { return torch::special_i1e(x); });
  has_memory = false;
  EXPECT_EQ(got.num_taped, 0);
  EXPECT_NE(got.stays_on_autograd.find("has other bits"), std::string::npos) << got.stays_on_autograd;
}

TEST(TapeFallback, WhatIsNotLibTorchsStaysOnAutograd) {
  const StageReport own = train_with(call_counted);
  EXPECT_EQ(own.num_taped, 0);
  EXPECT_EQ(own.stays_on_autograd, "tape_test::counted is none of LibTorch's own operators");
  const StageReport opaque_region = train_with([](const at::Tensor& x) { return opaque([](at::Tensor t) { return t * 2; }, x); });
  EXPECT_EQ(opaque_region.num_taped, 0);
  EXPECT_EQ(opaque_region.stays_on_autograd, "smp::opaque is none of LibTorch's own operators");
}

TEST(TapeFallback, NumbersThatChangeStayOnAutograd) {
  expect_twins_after(5, [](int s, SmallNet& net) { net.temperature = 2.0 + (s == 3 ? 1.5 : 0); }, [] {
    EXPECT_EQ(report().num_taped, 4);  // steps 2 and 4
    EXPECT_EQ(report().stays_on_autograd, "numbers that change from step to step");
  });
}

TEST(TapeFallback, AFrozenParameterGetsNoGradientFromAnOldTape) {
  expect_twins_after(6, [](int s, SmallNet& net) { net.second->weight.requires_grad_(s < 3); });
}

TEST(TapeFallback, AParameterWithOtherMemoryIsReadFromThere) {
  expect_twins_after(6, [](int s, SmallNet& net) {
    if (s == 3) net.second->weight.set_data(net.second->weight.detach() * 0.5);
  }, [] { EXPECT_GT(report().num_taped, 4); });
}

TEST(TapeFallback, HooksOnParametersAreCalled) {
  std::atomic<int> num_hooked = 0;
  expect_twins_after(4, [&](int s, SmallNet& net) {
    if (s != 2) return;
    net.second->weight.register_hook([&](const at::Tensor& gradient) {
      ++num_hooked;
      return gradient * 3;
    });
  }, [] { EXPECT_EQ(report().stays_on_autograd, "hooks on parameters"); });
  EXPECT_EQ(num_hooked, 8);  // two steps of two microbatches, of the model and of its twin
}

TEST(TapeFallback, GradientsClearedOrReplacedBetweenStepsAreMadeAnew) {
  expect_twins_after(6, [](int s, SmallNet& net) {
    if (s == 2) net.zero_grad(/*set_to_none=*/true);
    if (s == 3) net.zero_grad(/*set_to_none=*/false);
    if (s == 4) net.first->weight.mutable_grad() = torch::ones_like(net.first->weight);
  });
}

}  // namespace
}  // namespace smp
