// What is not taped, and what makes a tape go: the numbers stay those of the loop without smp, and the reason is told.
#include <ATen/record_function.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/library.h>

#include <atomic>
#include <string_view>

#include "smp/engine/rank/rank_state.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using runtime::StageReport;
using support::contains;
using support::message_of;
using tests::expect_as_in_a_loop;
using tests::Loop;
using tests::MicrobatchRun;
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
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tape_test::counted", "").typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

StageReport report() {
  const auto& stages = engine::rank_state("test").models.all().front()->first_program->rank_program.stages;
  EXPECT_EQ(stages.size(), 1U);
  return stages.begin()->second->report();
}

/// Of two microbatches on one rank, with `change` before each step.
Loop<SmallNet> small_loop(int steps, std::function<void(SmallNet&, int)> change, std::function<void()> look = [] {}) {
  return {.steps = steps,
          .config = {.microbatches = 2, .stage = StageKind::kTape},
          .before_step = std::move(change),
          .look = [look = std::move(look)](auto&) { look(); }};
}

void expect_twins_after(int steps, std::function<void(SmallNet&, int)> change, std::function<void()> look = [] {}) {
  expect_as_in_a_loop<SmallNet>(small_loop(steps, std::move(change), std::move(look)), tests::train_once);
}

TEST(TapeFallback, AStageIsTapedAfterTwoSteps) {
  expect_twins_after(
      3, [](SmallNet&, int) {},
      [] {
        EXPECT_EQ(report().num_taped, 2);
        EXPECT_EQ(report().stays_on_autograd, "");
      });
}

TEST(TapeFallback, AStageOfABodyThatReadsValuesIsTapedOnEveryRank) {
  Loop<SmallNet> loop{.config = {.microbatches = 2, .stage = StageKind::kTape}};
  loop.look = [](auto&) {
    const StageReport got = report();
    EXPECT_GT(got.num_taped, 0) << got.stays_on_autograd;
    EXPECT_EQ(got.stays_on_autograd, "");
  };
  for (const int ranks : {1, 2}) {
    loop.ranks = ranks;
    expect_as_in_a_loop<SmallNet>(loop, [](const MicrobatchRun& run) {
      const at::Tensor loss = run.forward(run.data).square().mean();
      run.trace.push_back(loss.item<double>());
      return run.trained(loss);
    });
  }
}

std::atomic<int> step_under_way = 0;  // a function that is opaque captures nothing

// Trains with one more term in the loss, which has no gradient, and returns how the stage ran.
StageReport train_with(const std::function<at::Tensor(const at::Tensor&)>& term, int steps, bool returns_term = true) {
  StageReport got;
  Loop<SmallNet> loop = small_loop(steps, [](SmallNet&, int step) { step_under_way = step; });
  loop.look = [&](DistributedModel<SmallNet>& model) {
    got = report();
    const std::string said = "stage 0 stays on autograd: " + got.stays_on_autograd + "\n";
    EXPECT_EQ(model.plan_text().ends_with(said), !got.stays_on_autograd.empty()) << model.plan_text();
  };
  expect_as_in_a_loop<SmallNet>(loop, [&](const MicrobatchRun& run) {
    const at::Tensor added = term(run.data).mean(), loss = run.forward(run.data).square().mean();
    const at::Tensor whole = run.trained(loss + added);
    return returns_term ? whole : loss;
  });
  return got;
}

TEST(TapeFallback, OtherBitsAreNoticedAndAutogradStays) {
  has_memory = true;
  const StageReport got = train_with([](const at::Tensor& x) { return torch::special_i1e(x); }, 3, /*returns_term=*/false);
  has_memory = false;
  EXPECT_EQ(got.num_taped, 0);
  EXPECT_NE(got.stays_on_autograd.find("has other bits"), std::string::npos) << got.stays_on_autograd;
}

at::Tensor twice_opaque(const at::Tensor& x) {
  return opaque([](at::Tensor t) { return t * 2; }, x);
}

// A report without the number of operators, which is the last thing it says.
std::string reason_of(const StageReport& report) {
  return report.stays_on_autograd.substr(0, report.stays_on_autograd.find(" ("));
}

TEST(TapeFallback, WhatIsNotLibTorchsStaysOnAutogradAndTheRestIsTaped) {
  const StageReport own = train_with(call_counted, 5);
  EXPECT_EQ(own.num_taped, 6);  // the rest recorded in step 1, as if there were nothing else
  EXPECT_EQ(reason_of(own), "tape_test::counted is none of LibTorch's own operators");
  EXPECT_NE(own.stays_on_autograd.find("(1 of "), std::string::npos) << own.stays_on_autograd;
  const StageReport opaque_region = train_with(twice_opaque, 5);
  EXPECT_EQ(opaque_region.num_taped, 6);
  EXPECT_EQ(reason_of(opaque_region), "smp::opaque is none of LibTorch's own operators");
}

at::Tensor ten_sines(at::Tensor x) {
  for (int i = 0; i < 10; ++i) x = x.sin();
  return x;
}

TEST(TapeFallback, AStageIsCutAroundAllThatIsNotLibTorchs) {
  const StageReport got = train_with([](const at::Tensor& x) { return call_counted(ten_sines(twice_opaque(x))); }, 5);
  EXPECT_EQ(got.num_taped, 6);
  EXPECT_EQ(got.num_on_autograd, 2U);
}

TEST(TapeFallback, AStageIsCutAroundWhatReadsValuesToo) {
  const auto both = [](const at::Tensor& x) { return ten_sines(at::cat(at::tensor_split(ten_sines(twice_opaque(x)), 2))); };
  const StageReport got = train_with(both, 5);
  EXPECT_EQ(got.num_taped, 6);
  EXPECT_EQ(reason_of(got), "smp::opaque is none of LibTorch's own operators; aten::tensor_split reads values");
}

// Trains with gradients that pass through an opaque region between two tapes.
template <class Region>
void expect_twins_around(Region region, int steps) {
  const auto turn = [](SmallNet&, int step) { step_under_way = step; };
  const auto look = [steps] {
    EXPECT_EQ(report().num_taped, 2 * (steps - 2));
    EXPECT_EQ(report().num_on_autograd, 1U);
  };
  expect_as_in_a_loop<SmallNet>(small_loop(steps, turn, look), [&](const MicrobatchRun& run) {
    return run.trained(ten_sines(opaque(region, ten_sines(run.forward(run.data)))).sum());
  });
}

TEST(TapeFallback, GradientsPassThroughAnOpaqueRegionBetweenTapes) {
  expect_twins_around([](at::Tensor t) { return t.tanh(); }, 6);
}

// Behind the recording its gradient is a product, transposed.
TEST(TapeFallback, AnOpaqueRegionMayGiveGradientsOfAnotherGeometryLater) {
  expect_twins_around(
      [](at::Tensor t) {
        if (step_under_way < 4) return t * 2;
        const at::Tensor twice = 2 * torch::eye(t.size(1));
        return twice.mm(t.t().contiguous()).t().contiguous();
      },
      6);
}

// A layout that a segment was not recorded for: its microbatches run under autograd, and the report says so.
TEST(TapeFallback, AnOpaqueRegionMayGiveValuesOfAnotherGeometryLater) {
  const auto twice = [](at::Tensor t) { return step_under_way < 4 ? t * 2 : (t.t().contiguous() * 2).t(); };
  const StageReport got = train_with([&](const at::Tensor& x) { return ten_sines(opaque(twice, ten_sines(x))); }, 6);
  EXPECT_NE(got.stays_on_autograd.find("laid out in memory otherwise"), std::string::npos) << got.stays_on_autograd;
}

// What a tape holds cannot be written into a gradient of many elements in one place.
TEST(TapeFallback, AGradientThatCannotTakeTheRecordedFormNamesTheStep) {
  const auto shared_gradient_first = [](at::Tensor t) {
    return step_under_way < 4 ? t.sum().expand(t.sizes()).contiguous() : t * 2;
  };
  const std::string text = message_of<std::exception>([&] { expect_twins_around(shared_gradient_first, 6); });
  EXPECT_TRUE(contains(text, "expected a gradient as in the microbatch that was recorded")) << text;
  EXPECT_TRUE(contains(text, "stage: autograd")) << text;
}

at::Tensor written_behind;

std::unique_ptr<at::ObserverContext> write_behind(const at::RecordFunction&) {
  written_behind.unsafeGetTensorImpl()->bump_version();
  return nullptr;
}

// Here: with each operator, those of the second forward among them.
TEST(TapeFallback, AWeightWrittenBeforeItsBackwardIsNoticed) {
  for (const StageKind stage : {StageKind::kTape, StageKind::kAutograd}) {
    const Config config{.microbatches = 2, .pipeline = Pipeline::kSimple, .stage = stage, .log_level = LogLevel::kOff};
    tests::run_smp_ranks(1, config, [&] {
      const auto net = tests::make_net();
      DistributedModel model(net);
      auto step = tests::training_step(model);
      for (int s = 0; s < 5; ++s) step(rows(8, 8, s), rows(8, 4, s));
      EXPECT_EQ(report().num_taped > 0, stage == StageKind::kTape);
      written_behind = net->second->weight;
      const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(write_behind));
      const std::string text = message_of<std::exception>([&] { step(rows(8, 8, 3), rows(8, 4, 3)); });
      at::removeCallback(handle);
      written_behind.reset();
      EXPECT_NE(text.find("modified by an inplace operation"), std::string::npos) << text;
    });
  }
}

TEST(TapeFallback, NumbersThatChangeStayOnAutograd) {
  expect_twins_after(
      5, [](SmallNet& net, int s) { net.temperature = 2.0 + (s == 3 ? 1.5 : 0); },
      [] {
        EXPECT_EQ(report().num_taped, 4);  // steps 2 and 4
        EXPECT_EQ(report().stays_on_autograd, "numbers that change from step to step");
      });
}

TEST(TapeFallback, AnomalyModeStaysOnAutograd) {
  expect_twins_after(
      5, [](SmallNet&, int s) { torch::autograd::AnomalyMode::set_enabled(s == 3); },
      [] {
        EXPECT_EQ(report().num_taped, 4);  // steps 2 and 4
        EXPECT_EQ(report().stays_on_autograd, "anomaly mode");
      });
}

TEST(TapeFallback, EachReasonIsTold) {
  expect_twins_after(
      6,
      [](SmallNet& net, int s) {
        torch::autograd::AnomalyMode::set_enabled(s == 3);
        net.temperature = 2.0 + (s == 4 ? 1.5 : 0);
      },
      [] { EXPECT_EQ(report().stays_on_autograd, "anomaly mode; numbers that change from step to step"); });
}

// A tape that is recorded anew is compared anew.
TEST(TapeFallback, OtherBitsAreNoticedInALaterRecording) {
  Loop<SmallNet> loop = small_loop(8, [](SmallNet& net, int s) {
    has_memory = s >= 4;
    if (s != 4) return;
    EXPECT_EQ(report().num_taped, 4);  // steps 2 and 3
    net.second->weight.set_data(net.second->weight.detach() * 0.5);
  });
  loop.look = [](auto&) {
    has_memory = false;
    EXPECT_EQ(report().num_taped, 4);
    EXPECT_NE(report().stays_on_autograd.find("has other bits"), std::string::npos) << report().stays_on_autograd;
  };
  expect_as_in_a_loop<SmallNet>(loop, [](const MicrobatchRun& run) {
    const at::Tensor loss = run.forward(run.data).square().mean();
    run.backward(loss + torch::special_i1e(run.data).mean());  // the term has no gradient
    return loss;
  });
}

TEST(TapeFallback, AFrozenParameterGetsNoGradientFromAnOldTape) {
  expect_twins_after(6, [](SmallNet& net, int s) { net.second->weight.requires_grad_(s < 3); });
}

TEST(TapeFallback, AParameterWithOtherMemoryIsReadFromThere) {
  expect_twins_after(
      6,
      [](SmallNet& net, int s) {
        if (s == 3) net.second->weight.set_data(net.second->weight.detach() * 0.5);
      },
      [] { EXPECT_GT(report().num_taped, 4); });
}

TEST(TapeFallback, HooksOnParametersAreCalled) {
  std::atomic<int> num_hooked = 0;
  expect_twins_after(
      4,
      [&](SmallNet& net, int s) {
        if (s != 2) return;
        net.second->weight.register_hook([&](const at::Tensor& gradient) {
          ++num_hooked;
          return gradient * 3;
        });
      },
      [] { EXPECT_EQ(report().stays_on_autograd, "hooks on parameters"); });
  EXPECT_EQ(num_hooked, 8);  // two steps of two microbatches, of the model and of its twin
}

TEST(TapeFallback, GradientsClearedOrReplacedBetweenStepsAreMadeAnew) {
  expect_twins_after(6, [](SmallNet& net, int s) {
    if (s == 2) net.zero_grad(/*set_to_none=*/true);
    if (s == 3) net.zero_grad(/*set_to_none=*/false);
    if (s == 4) net.first->weight.mutable_grad() = torch::ones_like(net.first->weight);
  });
}

std::string_view counted_operator;
std::atomic<int> num_of_libtorch = 0;

std::unique_ptr<at::ObserverContext> count_one(const at::RecordFunction& function) {
  if (function.name() == counted_operator) ++num_of_libtorch;
  return nullptr;
}

// How often the operator is called through LibTorch meanwhile.
int calls_of(std::string_view name, const std::function<void()>& run) {
  counted_operator = name;
  num_of_libtorch = 0;
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(count_one));
  run();
  at::removeCallback(handle);
  return num_of_libtorch;
}

TEST(TapeKernels, DrawTheMasksOfDropout) {
  tests::run_smp_ranks(1, {.microbatches = 2, .log_level = LogLevel::kOff}, [] {
    const auto net = tests::make_net(at::kFloat, /*dropout=*/0.5);
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    const auto draws_of_a_step = [&] { return calls_of("aten::bernoulli_", [&] { step(tests::rows(8, 8, 0)); }); };
    EXPECT_GT(draws_of_a_step(), 0);  // under autograd
    step(tests::rows(8, 8, 1));
    EXPECT_EQ(draws_of_a_step(), 0);
  });
}

}  // namespace
}  // namespace smp
