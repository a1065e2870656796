// Tapes of recorded stages: the bits of autograd on other numbers, gradients in order, nothing left behind, errors that say
// where.
#include "runtime/stage/tape.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/support/bits.h"
#include "tests/support/messages.h"
#include "tests/unit/runtime/stage/watched_stage.h"

namespace smp::runtime {
namespace {

using namespace stage_graphs;
using support::contains;
using support::expect_bit_equal;

std::map<std::string, at::Tensor> by_name(const WatchedStage& stage, const Left& left) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& [id, gradient] : left.gradients) gradients[stage.graph.values[static_cast<size_t>(id)].name] = gradient;
  return gradients;
}

void expect_same(const WatchedStage& stage, const Left& got, const Left& want) {
  expect_bit_equal(got.outputs, want.outputs, "outputs");
  expect_bit_equal(got.results, want.results, "gradients of inputs");
  expect_bit_equal(by_name(stage, got), by_name(stage, want), "gradients of parameters");
}

TEST(StageTape, GivesTheBitsOfAutogradOnOtherNumbers) {
  WatchedStage stage = second_of_two();
  Tape tape = stage.taped({TwoLayers::input(1)});
  const Left want = stage.run_autograd({TwoLayers::input(2)});
  ASSERT_EQ(want.results.size(), 1U);
  ASSERT_EQ(want.gradients.size(), 2U);
  expect_same(stage, stage.run_tape(tape, {TwoLayers::input(2)}), want);
}

TEST(StageTape, ReadsParametersAsTheyAreNow) {
  WatchedStage stage = second_of_two();
  Tape tape = stage.taped({TwoLayers::input(1)});
  for (auto& [id, tensor] : stage.tensors) {
    const at::NoGradGuard no_grad;
    tensor.mul_(2);
  }
  expect_same(stage, stage.run_tape(tape, {TwoLayers::input(1)}), stage.run_autograd({TwoLayers::input(1)}));
}

TEST(StageTape, WeightGradientsWaitUntilTheyAreAskedFor) {
  WatchedStage stage = second_of_two();
  Tape tape = stage.taped({TwoLayers::input(1)});
  ASSERT_TRUE(tape.leaves_weights());
  const Left want = stage.run_autograd({TwoLayers::input(2)});
  Left left;
  const GradientSink sink = stage.sink_into(left, tape);
  Slots slots;
  tape.forward(slots, {TwoLayers::input(2)}, stage.own(), stage.run_context({}));
  expect_bit_equal(tape.backward(slots, 0, stage.roots(), stage.run_context({}), sink), want.results,
                   "what others wait for");
  EXPECT_LT(left.gradients.size(), want.gradients.size());
  tape.weight_gradients(slots, stage.run_context({}), sink);
  expect_bit_equal(by_name(stage, left), by_name(stage, want), "gradients of parameters");
}

TEST(StageTape, AStageThatSendsNoGradientLeavesNothing) {
  WatchedStage stage(TwoLayers().graph);
  Tape tape = stage.taped({TwoLayers::input(1)});
  EXPECT_FALSE(tape.leaves_weights());
  expect_same(stage, stage.run_tape(tape, {TwoLayers::input(2)}), stage.run_autograd({TwoLayers::input(2)}));
}

TEST(StageTape, NothingOfAMicrobatchIsLeftBehindIt) {
  WatchedStage stage = second_of_two();
  Tape tape = stage.taped({TwoLayers::input(1)});
  Slots slots;
  stage.run_tape(tape, {TwoLayers::input(2)}, {}, &slots);
  for (size_t slot = 0; slot < slots.size(); ++slot) EXPECT_FALSE(slots[slot].defined()) << "slot " << slot;
}

TEST(StageTape, MicrobatchesInFlightDoNotMix) {
  WatchedStage stage = second_of_two();
  Tape tape = stage.taped({TwoLayers::input(1)});
  std::vector<Slots> slots(3);
  for (size_t m = 0; m < slots.size(); ++m)
    tape.forward(slots[m], {TwoLayers::input(static_cast<double>(m))}, stage.own(), stage.run_context({}));
  for (const size_t m : {size_t{1}, size_t{2}, size_t{0}}) {
    const Left want = stage.run_autograd({TwoLayers::input(static_cast<double>(m))});
    Left left;
    expect_bit_equal(tape.backward(slots[m], 0, stage.roots(), stage.run_context({}), stage.sink_into(left, tape)),
                     want.results, "of one of them");
  }
}

TEST(StageTape, EvaluationHasNoBackward) {
  GraphBuilder g;
  const ValueId x = g.input({4, 3}), y = g.linear(x, "fc", 2);
  Graph graph = g.build();
  graph.returned = {y};
  WatchedStage stage(graph);
  Tape tape = stage.taped({numbers({4, 3}, 1)});
  EXPECT_TRUE(tape.lists().backwards.empty());
  expect_same(stage, stage.run_tape(tape, {numbers({4, 3}, 2)}), stage.run_autograd({numbers({4, 3}, 2)}));
}

TEST(StageTape, DrawsAsAutogradDoesForThatMicrobatch) {
  GraphBuilder g;
  const ValueId x = g.linear(g.input({8, 16}), "fc", 16), dropped = call(g, "aten::dropout", {x}, {0.5, true});
  g.last_node().random_ordinal = 2;
  WatchedStage stage(g.build(loss_of(g, mul(g, dropped, x))));
  const at::Tensor input = numbers({8, 16}, 1);
  const auto of_microbatch = [](uint64_t m) {
    return MicrobatchContext{.random = {.base_seed = 3, .step = 1, .microbatch = m}, .scalars = {}};
  };
  Tape tape = stage.taped({input}, of_microbatch(0));
  const Left first = stage.run_autograd({input}, of_microbatch(0)), other = stage.run_autograd({input}, of_microbatch(5));
  EXPECT_FALSE(first.outputs[0].equal(other.outputs[0])) << "or nothing is tested";
  expect_same(stage, stage.run_tape(tape, {input}, of_microbatch(5)), other);
}

TEST(StageTape, AWrittenBufferIsWrittenOncePerForward) {
  GraphBuilder g;
  const ValueId x = g.input({4, 3}), buffer = g.buffer("sum", {4, 3});
  const ValueId sum = add_in_place(g, buffer, x);
  WatchedStage stage(g.build(loss_of(g, mul(g, g.linear(x, "fc", 3), sum))));
  const at::Tensor input = numbers({4, 3}, 1);
  Tape tape = stage.taped({input});
  at::Tensor& content = stage.tensors.at(buffer);
  const at::Tensor before = content.clone();
  const Left got = stage.run_tape(tape, {input});
  expect_bit_equal(content, before.add(input), "the buffer");
  content.copy_(before);
  const Left want = stage.run_autograd({input});
  expect_same(stage, got, want);
}

TEST(StageTape, AWeightWrittenBetweenForwardAndBackwardIsNamed) {
  WatchedStage stage = second_of_two();
  Tape tape = stage.taped({TwoLayers::input(1)});
  const std::vector<int64_t> versions = tape.versions();
  ASSERT_EQ(versions.size(), 1U) << "the weight; no backward reads the bias";
  EXPECT_NO_THROW(tape.check_versions(versions));
  for (auto& [id, tensor] : stage.tensors) {
    const at::NoGradGuard no_grad;
    tensor.add_(1);
  }
  const std::string text = support::message_of<c10::Error>([&] { tape.check_versions(versions); });
  EXPECT_TRUE(contains(text, "modified by an inplace operation: 'fc.weight' is at version " +
                                 std::to_string(versions[0] + 1) + "; expected version " + std::to_string(versions[0]) +
                                 " instead"))
      << text;
  EXPECT_NO_THROW(tape.check_versions(tape.versions()));
}

/// relu of a trained input, whose gradient enters.
struct Entering {
  GraphBuilder g;
  ValueId x = g.linear(g.input({2, 3}), "before", 3), y = g.linear(x, "here", 3), z = g.linear(y, "behind", 3);
  WatchedStage stage{g.build(loss_of(g, z)), 3, {{"before", 0}, {"here", 1}, {"behind", 2}}, 1};
  Tape tape = stage.taped({numbers({2, 3}, 1)});

  Tensors results(const at::Tensor& gradient) {
    Slots slots;
    Left left;
    tape.forward(slots, {numbers({2, 3}, 1)}, stage.own(), stage.run_context({}));
    return tape.backward(slots, 0, {gradient}, stage.run_context({}), stage.sink_into(left, tape));
  }
};

TEST(StageTape, AGradientThatEntersInAnotherGeometryIsCopied) {
  Entering entering;
  const at::Tensor gradient = numbers({2, 3}, 0.5);
  expect_bit_equal(entering.results(gradient.t().contiguous().t()), entering.results(gradient), "transposed in memory");
}

TEST(StageTape, AGradientThatCannotEnterIsRefused) {
  Entering entering;
  for (const at::Tensor& other : {at::Tensor(), at::full({3, 2}, 1.0), at::full({2, 3}, 1.0, at::kDouble)}) {
    const std::string text = support::message_of<c10::Error>([&] { entering.results(other); });
    EXPECT_TRUE(contains(text, "of sizes [2, 3] and strides [3, 1], got another as root 0 of backward 0")) << text;
  }
}

TEST(StageTape, ErrorsNameOperatorModuleMicrobatchAndDirection) {
  WatchedStage stage = second_of_two();
  Tape tape = stage.taped({TwoLayers::input(1)});
  const std::string text = support::message_of<c10::Error>(
      [&] { stage.run_tape(tape, {numbers({5, 7}, 1)}, {.microbatch = 3, .random = {}, .scalars = {}}); });
  EXPECT_TRUE(contains(text, "in aten::linear of module 'fc', microbatch 3")) << text;
  Slots slots;
  Left left;
  const Tape::RunContext context = stage.run_context({.microbatch = 4, .random = {}, .scalars = {}});
  tape.forward(slots, {TwoLayers::input(1)}, stage.own(), context);
  for (at::Tensor& slot : slots) {
    if (slot.defined() && slot.dim() == 2) slot = numbers({5, 7}, 1);
  }
  const std::string behind =
      support::message_of<c10::Error>([&] { tape.backward(slots, 0, stage.roots(), context, stage.sink_into(left, tape)); });
  EXPECT_TRUE(contains(behind, "in the backward of aten::mul, microbatch 4")) << behind;
}

}  // namespace
}  // namespace smp::runtime
