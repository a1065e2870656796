// A replay alone: which tensors it reads, keeps and frees, under which modes and seeds its operators run, and what it says.
#include "runtime/stage/replay.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "tests/support/bits.h"
#include "tests/support/messages.h"
#include "tests/unit/runtime/stage/stage_graphs.h"

namespace smp::runtime {
namespace {

using namespace stage_graphs;
using support::contains;
using support::expect_bit_equal;
using External = std::map<ValueId, at::Tensor>;

/// All operators of a graph, and what the last run said.
struct ReplayOf {
  ReplayOf(const Graph& graph, std::vector<ValueId> kept_values)
      : replay(graph, all_nodes(graph), kept_values), kept(std::move(kept_values)) {}

  std::vector<at::Tensor> run(const External& external, const MicrobatchContext& context = {},
                              StageWatcher* watcher = nullptr) {
    slots.assign(replay.num_slots(), at::Tensor());
    for (const ValueId id : replay.external()) slots[static_cast<size_t>(replay.slot_of(id))] = external.at(id);
    said = replay.run(slots, context, {}, watcher);
    std::vector<at::Tensor> results;
    for (const ValueId id : kept) results.push_back(slots[static_cast<size_t>(replay.slot_of(id))]);
    return results;
  }

  Replay replay;
  std::vector<ValueId> kept;
  Slots slots;
  std::string said;
};

TEST(Replay, RunsTheOperatorsInTheirOrderAndKeepsWhatItShall) {
  GraphBuilder g;
  const ValueId x = g.input({2, 3}), hidden = g.linear(x, "fc", 4), active = g.relu(hidden), y = mul(g, active, hidden);
  const Graph graph = g.build();
  const at::Tensor input = numbers({2, 3}, 1), weight = numbers({4, 3}, 2), bias = numbers({4}, 3);
  const at::Tensor linear = at::linear(input, weight, bias);
  ReplayOf it(graph, {hidden, y});
  ASSERT_EQ(it.replay.external().size(), 3U);
  const std::vector<at::Tensor> got =
      it.run({{x, input}, {it.replay.external()[1], weight}, {it.replay.external()[2], bias}});
  expect_bit_equal(got, {linear, linear.relu().mul(linear)}, "kept");
  EXPECT_EQ(std::count_if(it.slots.begin(), it.slots.end(), [](const at::Tensor& slot) { return slot.defined(); }), 2)
      << "no others";
}

TEST(Replay, ReadsWhatNoneOfItsOperatorsMakeAndWhatPassesThrough) {
  GraphBuilder g;
  const ValueId passing = g.input({2}), unused = g.input({2}), x = g.input({2}), y = g.relu(g.relu(x));
  const Graph graph = g.build();
  const Replay second(graph, {1}, {y, passing});
  EXPECT_EQ(second.external(), (std::vector<ValueId>{passing, graph.nodes[0].outputs[0]}));
  EXPECT_EQ(second.slot_of(unused), -1);
  EXPECT_EQ(second.slot_of(x), -1);
  EXPECT_EQ(second.num_slots(), 3U);
}

TEST(Replay, ListsOfTensorsKeepTheirMissingElements) {
  GraphBuilder g;
  const ValueId x = g.input({2, 3}), index = g.input({2}, at::kLong);
  const ValueId joined = g.op("aten::cat", {}, {4, 3});
  g.last_node().arguments = {partitioner::ValueRefList{{x, x}}, int64_t{0}};
  const ValueId picked = g.op("aten::index", {joined}, {4, 2});
  g.last_node().overload = "Tensor";
  g.last_node().arguments.emplace_back(partitioner::ValueRefList{{partitioner::kNoValue, index}, true});
  ReplayOf it(g.build(), {picked});
  const at::Tensor input = numbers({2, 3}, 1);
  const at::Tensor columns = at::arange(2, at::kLong);
  expect_bit_equal(it.run({{x, input}, {index, columns}})[0], at::cat({input, input}).index_select(1, columns), "columns");
}

/// Which results are there still when an operator is called.
class LifeWatcher : public StageWatcher {
 public:
  void call_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack, NodeId, int32_t) override {
    std::string alive;
    for (size_t n = 0; n < made_.size(); ++n) {
      if (!made_[n].expired()) alive += std::to_string(n);
    }
    alive_by_call.push_back(alive);
    op.callBoxed(stack);
    made_.push_back(stack.back().toTensor().storage().getWeakStorageImpl());
  }
  bool gradient_made(ValueId, const at::Tensor&) override { return true; }
  std::vector<std::string> alive_by_call;

 private:
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made_;
};

TEST(Replay, FreesEachTensorAtItsLastUse) {
  GraphBuilder g;
  const ValueId x = g.input({8}), a = g.relu(x), b = g.relu(a), c = g.relu(b), d = mul(g, c, a);
  const Graph graph = g.build();
  LifeWatcher watcher;
  ReplayOf(graph, {d}).run({{x, at::ones({8})}}, {}, &watcher);
  EXPECT_EQ(watcher.alive_by_call, (std::vector<std::string>{"", "0", "01", "02"}));
}

TEST(Replay, GradModeAndAutocastAreThoseOfEachOperatorAndTheOldOnesComeBack) {
  GraphBuilder g;
  const ValueId x = g.input({2, 3}), weight = g.parameter("weight", {3}), trained = mul(g, x, weight),
                frozen = mul(g, x, weight);
  g.last_node().grad_enabled = false;
  const ValueId half = g.op("aten::linear", {x, x}, {2, 2});
  g.last_node().arguments.emplace_back();
  g.spec(half).dtype = at::kBFloat16;
  g.last_node().autocast = {.enabled = true, .dtype = at::kBFloat16};
  const ValueId whole = g.op("aten::linear", {x, x}, {2, 2});
  g.last_node().arguments.emplace_back();
  ReplayOf it(g.build(), {trained, frozen, half, whole});
  const at::NoGradGuard outside;
  const auto got = it.run({{x, at::ones({2, 3})}, {weight, at::ones({3}).requires_grad_()}});
  EXPECT_TRUE(got[0].requires_grad());
  EXPECT_FALSE(got[1].requires_grad());
  EXPECT_EQ(got[2].scalar_type(), at::kBFloat16);
  EXPECT_EQ(got[3].scalar_type(), at::kFloat);
  EXPECT_FALSE(at::GradMode::is_enabled());
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Replay, ModesComeBackWhenAnOperatorThrows) {
  GraphBuilder g;
  const ValueId x = g.input({2}), other = g.input({3}), y = add(g, x, other);
  g.last_node().grad_enabled = false;
  g.last_node().autocast = {.enabled = true, .dtype = at::kBFloat16};
  ReplayOf it(g.build(), {y});
  EXPECT_THROW(it.run({{x, at::ones({2})}, {other, at::ones({3})}}), c10::Error);
  EXPECT_TRUE(at::GradMode::is_enabled());
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

at::Tensor dropped(const at::Tensor& x, const RandomState& random, uint64_t ordinal) {
  const GeneratorHold seed(random, ordinal);
  return at::dropout(x, 0.5, true);
}

TEST(Replay, RandomOperatorsDrawByTheirOwnNumberAndThatOfTheMicrobatch) {
  GraphBuilder g;
  const ValueId x = g.input({64}), y = call(g, "aten::dropout", {x}, {0.5, true});
  g.last_node().random_ordinal = 3;
  ReplayOf it(g.build(), {y});
  EXPECT_TRUE(it.replay.has_random());
  const at::Tensor input = at::ones({64});
  for (const uint64_t microbatch : {0, 5}) {
    const MicrobatchContext context{
        .microbatch = 1, .random = {.base_seed = 7, .step = 2, .microbatch = microbatch}, .scalars = {}};
    expect_bit_equal(it.run({{x, input}}, context)[0], dropped(input, context.random, 3),
                     "microbatch " + std::to_string(microbatch));
  }
}

TEST(Replay, ADropoutThatRestsDrawsNothing) {
  GraphBuilder g;
  const ValueId x = g.input({64}), y = call(g, "aten::dropout", {x}, {0.5, false});
  g.last_node().random_ordinal = 0;
  const ReplayOf it(g.build(), {y});
  EXPECT_FALSE(it.replay.has_random());
}

TEST(Replay, NumbersOfAMicrobatchStandInForTheRecordedOnesOnce) {
  GraphBuilder g;
  const ValueId x = g.input({4}), y = call(g, "aten::leaky_relu", {x}, {0.1}), z = call(g, "aten::leaky_relu", {y}, {0.5});
  ReplayOf it(g.build(), {z});
  const External external{{x, at::full({4}, -1.0)}};
  const auto slope = [&](const std::vector<partitioner::ScalarOverride>& scalars) {
    return it.run(external, {.random = {}, .scalars = scalars})[0].min();
  };
  expect_bit_equal(slope({}), at::full({}, 0.1F).mul_(-1).mul_(0.5), "as recorded");
  expect_bit_equal(slope({{0, 1, 0.25}}), at::full({}, -0.125F), "the first");
  expect_bit_equal(slope({{1, 1, 2.0}}), at::full({}, 0.1F).mul_(-1).mul_(2), "the second");
  expect_bit_equal(slope({{0, 1, 0.25}, {1, 1, 2.0}}), at::full({}, -0.5F), "both");
  expect_bit_equal(slope({{5, 1, 2.0}}), slope({}), "of an operator of another stage");
  EXPECT_TRUE(contains(support::message_of<c10::ValueError>([&] { slope({{0, 3, 1.0}}); }),
                       "expected one of the 2 arguments of aten::leaky_relu, got number 3"));
  expect_bit_equal(slope({}), at::full({}, 0.1F).mul_(-1).mul_(0.5), "as recorded, again");
}

TEST(Replay, ErrorsNameOperatorModuleAndMicrobatch) {
  GraphBuilder g;
  const ValueId x = g.input({2}), other = g.input({3}), y = add(g, g.relu(x), other);
  g.last_node().module = "encoder.0";
  ReplayOf it(g.build(), {y});
  const std::string text = support::message_of<c10::Error>(
      [&] { it.run({{x, at::ones({2})}, {other, at::ones({3})}}, {.microbatch = 2, .random = {}, .scalars = {}}); });
  EXPECT_TRUE(contains(text, "in aten::add of module 'encoder.0', microbatch 2")) << text;
  expect_bit_equal(it.run({{x, at::ones({2})}, {other, at::ones({2})}})[0], at::full({2}, 2.0), "the next microbatch");
}

TEST(Replay, ResultsOfOtherSizesOrDtypeThanRecordedAreRefused) {
  GraphBuilder g;
  const ValueId x = g.input({4}), places = g.op("aten::nonzero", {x}, {4, 1});
  g.spec(places).dtype = at::kLong;
  g.last_node().module = "encoder.0";
  const ValueId active = g.relu(x);
  ReplayOf it(g.build(), {places, active});
  expect_bit_equal(it.run({{x, at::ones({4})}})[0], at::arange(4, at::kLong).view({4, 1}), "as recorded");
  std::string text = support::message_of<c10::Error>([&] { it.run({{x, at::arange(4, at::kFloat)}}); });
  EXPECT_TRUE(contains(text, "expected sizes [4, 1] and Long as recorded without data, got [3, 1] and Long")) << text;
  EXPECT_TRUE(contains(text, "in aten::nonzero of module 'encoder.0', microbatch 0")) << text;
  text = support::message_of<c10::Error>([&] { it.run({{x, at::ones({4}, at::kInt)}}); });
  EXPECT_TRUE(contains(text, "got [4] and Int")) << text;
}

TEST(Replay, MoreOrFewerResultsThanRecordedAreRefused) {
  GraphBuilder g;
  const ValueId x = g.input({2, 4}), second = g.input({4}), first = g.op("aten::unbind", {x}, {4});
  g.last_node().overload = "int";
  g.last_node().arguments.emplace_back(int64_t{0});
  g.last_node().outputs.push_back(second);
  ReplayOf it(g.build(), {first, second});
  expect_bit_equal(it.run({{x, at::ones({2, 4})}}), {at::ones({4}), at::ones({4})}, "as recorded");
  for (const int64_t rows : {1, 3}) {
    const std::string text = support::message_of<c10::Error>([&] { it.run({{x, at::ones({rows, 4})}}); });
    EXPECT_TRUE(contains(text, "expected 2 results as recorded without data, got " + std::to_string(rows))) << text;
    EXPECT_TRUE(contains(text, "smp::opaque")) << text;
  }
}

TEST(Replay, OperatorsWithArgumentsMissingAreRefused) {
  GraphBuilder g;
  const ValueId x = g.input({2}), y = g.op("aten::leaky_relu", {x}, {2});
  const Graph graph = g.build();
  const std::string text = support::message_of<c10::ValueError>([&] { Replay(graph, {0}, {y}); });
  EXPECT_TRUE(contains(text, "expected 2 arguments of aten::leaky_relu, got 1")) << text;
}

/// weight * buffer, where the buffer counts microbatches, before or after it is used.
struct CountingStage {
  explicit CountingStage(bool counts_first) {
    if (counts_first) read = add_in_place(g, buffer, one);
    product = mul(g, weight, read);
    g.last_node().module = "reader";
    if (counts_first) return;
    add_in_place(g, buffer, one);
    g.last_node().module = "writer";
  }
  GraphBuilder g;
  ValueId weight = g.parameter("weight", {2}), buffer = g.buffer("count", {2}), one = g.input({2}), read = buffer,
          product = -1;
  at::Tensor trained = at::full({2}, 3.0).requires_grad_(), count = at::full({2}, 10.0);
  const External external{{weight, trained}, {buffer, count}, {one, at::ones({2})}};
};

// The second microbatch writes to the buffer before the first has gone backward.
TEST(Replay, ABackwardFindsTheBufferAsItsOwnForwardDid) {
  CountingStage stage(true);
  ReplayOf it(stage.g.build(), {stage.product});
  const at::Tensor first = it.run(stage.external)[0], second = it.run(stage.external)[0];
  EXPECT_EQ(it.said, "");
  expect_bit_equal(stage.count, at::full({2}, 12.0), "the buffer");
  first.sum().backward();
  expect_bit_equal(stage.trained.grad(), at::full({2}, 11.0), "of the first");
  second.sum().backward();
  expect_bit_equal(stage.trained.grad(), at::full({2}, 23.0), "and of the second");
}

TEST(Replay, ABufferWrittenAfterItsUseMakesTheBackwardThrowAndIsNamed) {
  CountingStage stage(false);
  ReplayOf it(stage.g.build(), {stage.product});
  const at::Tensor product = it.run(stage.external)[0];
  EXPECT_TRUE(contains(it.said,
                       "expected 'count' to stay as aten::mul of module 'reader' has found it until the backward, got "
                       "aten::add_ of module 'writer' in the same forward"))
      << it.said;
  EXPECT_THROW(product.sum().backward(), c10::Error);
}

/// How often operators run beside those of the graph.
class CloneWatcher : public StageWatcher {
 public:
  void call_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack, NodeId, int32_t) override {
    num_clones += op.operator_name().name == "aten::clone";
    op.callBoxed(stack);
  }
  bool gradient_made(ValueId, const at::Tensor&) override { return true; }
  int num_clones = 0;
};

TEST(Replay, WhatTurnsOutNotToBeSavedIsCopiedOnce) {
  GraphBuilder g;
  const ValueId weight = g.parameter("weight", {2}), buffer = g.buffer("count", {2}), one = g.input({2});
  const ValueId count = add_in_place(g, buffer, one), sum = add(g, weight, count), product = mul(g, sum, count);
  ReplayOf it(g.build(), {product});
  const External external{{weight, at::ones({2}).requires_grad_()}, {buffer, at::ones({2})}, {one, at::ones({2})}};
  CloneWatcher first, second;
  it.run(external, {}, &first);
  it.run(external, {}, &second);
  EXPECT_EQ(first.num_clones, 2) << "of a sum and a product";
  EXPECT_EQ(second.num_clones, 1) << "a sum saves nothing";
}

}  // namespace
}  // namespace smp::runtime
