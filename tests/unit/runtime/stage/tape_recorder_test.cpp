// A tape recorder alone: which leaf operators it notes on which slots, what they are part of, and why it refuses.
#include "runtime/stage/tape_recorder.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/support/bits.h"
#include "tests/unit/runtime/stage/watched_stage.h"

namespace smp::runtime {
namespace {

using namespace stage_graphs;
using support::expect_bit_equal;
using Kind = TapeCall::Kind;
constexpr NodeId kNode = 5;

std::string name_of(const TapeCall& call) {
  const char* kinds[] = {"", "view", "gradient"};
  return call.kind == Kind::kOperator ? call.op.operator_name().name.substr(6) : kinds[static_cast<size_t>(call.kind)];
}

std::vector<std::string> names_in(const TapeLists& lists, size_t begin, size_t end) {
  std::vector<std::string> names;
  for (size_t n = begin; n < end; ++n) names.push_back(name_of(lists.calls[n]));
  return names;
}

class RecordedTape : public ::testing::Test {
 protected:
  at::Tensor entered(ValueId value, const at::Tensor& tensor) {
    recorder_.entered(value, tensor);
    return tensor;
  }
  at::Tensor call(const char* name, const char* overload, torch::jit::Stack stack, int32_t random_ordinal = -1) {
    recorder_.call_operator(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), stack, kNode, random_ordinal);
    return stack.back().toTensor();
  }
  TapeLists lists_of(const Tensors& outputs) {
    recorder_.end_forward(outputs);
    EXPECT_EQ(recorder_.refusal(), "");
    return recorder_.take();
  }
  at::Tensor input() { return entered(0, numbers({2, 3}, 1)); }

  at::Tensor weight_ = numbers({3}, 2);
  TapeRecorder recorder_{{{{.value = 7}, weight_, true}}};
};

TEST_F(RecordedTape, InputsAndOwnTensorsAreBoundToSlots) {
  const at::Tensor x = input();
  entered(7, weight_);
  const TapeLists lists = lists_of({call("aten::mul", "Tensor", {x, weight_})});
  ASSERT_EQ(lists.inputs.size(), 1U);
  EXPECT_EQ(lists.inputs[0].value, 0);
  EXPECT_TRUE(fits(x, lists.inputs[0].geometry));
  ASSERT_EQ(lists.own.size(), 1U);
  EXPECT_TRUE(lists.own[0].tensor.is_same(weight_) && lists.own[0].is_fixed && fits(weight_, lists.own[0].geometry));
  ASSERT_EQ(lists.calls.size(), 1U);
  EXPECT_EQ(lists.calls[0].tensors[0].slot, lists.inputs[0].slot);
  EXPECT_EQ(lists.calls[0].tensors[1].slot, lists.own[0].slot);
  EXPECT_EQ(lists.calls[0].outputs, lists.outputs);
  EXPECT_EQ(lists.calls[0].node, kNode);
  EXPECT_FALSE(lists.calls[0].has_effect || lists.has_random || lists.inputs[0].is_written || lists.own[0].is_written);
  EXPECT_EQ(lists.num_slots, 3U);
  EXPECT_EQ(std::set<int32_t>(lists.slot_memories.begin(), lists.slot_memories.end()).size(), 3U);
}

TEST_F(RecordedTape, CompositesAreTheirLeavesAndViewsAreGeometries) {
  const at::Tensor x = input(), matrix = entered(1, numbers({4, 3}, 2));
  const TapeLists lists = lists_of({call("aten::linear", "", {x, matrix, c10::IValue()})});
  EXPECT_EQ(names_in(lists, 0, lists.calls.size()), (std::vector<std::string>{"view", "mm"}));
  EXPECT_EQ(lists.calls[0].geometry, geometry_of(matrix.t()));
  EXPECT_EQ(lists.slot_memories[static_cast<size_t>(lists.calls[0].outputs[0])],
            lists.slot_memories[static_cast<size_t>(lists.inputs[1].slot)]);
}

TEST_F(RecordedTape, ATensorIsKnownByItsMemoryAndGeometryWhoeverHandsItOut) {
  const at::Tensor x = input();
  const at::Tensor sum = call("aten::add", "Tensor", {x.detach(), x.alias(), 1});
  const TapeLists lists = lists_of({call("aten::mul", "Tensor", {sum.detach(), x.flatten().view({2, 3})})});
  ASSERT_EQ(lists.calls.size(), 2U);
  EXPECT_EQ(lists.calls[0].tensors[0].slot, lists.inputs[0].slot);
  EXPECT_EQ(lists.calls[0].tensors[1].slot, lists.inputs[0].slot);
  EXPECT_EQ(lists.calls[1].tensors[0].slot, lists.calls[0].outputs[0]);
  EXPECT_EQ(lists.calls[1].tensors[1].slot, lists.inputs[0].slot);
}

TEST_F(RecordedTape, AnotherGeometryOfKnownMemoryIsAViewOfIt) {
  const at::Tensor x = input();
  const TapeLists lists = lists_of({call("aten::neg", "", {x.t()})});
  EXPECT_EQ(names_in(lists, 0, 2), (std::vector<std::string>{"view", "neg"}));
  EXPECT_EQ(lists.calls[0].tensors[0].slot, lists.inputs[0].slot);
  EXPECT_EQ(lists.calls[1].tensors[0].slot, lists.calls[0].outputs[0]);
}

TEST_F(RecordedTape, AWriteInPlaceHasAnEffectAndMarksWhatItWritesTo) {
  const at::Tensor x = input();
  entered(7, weight_);
  const at::Tensor view = call("aten::select", "int", {x, 0, 1});
  call("aten::add_", "Tensor", {view, weight_, 1});
  const TapeLists lists = lists_of({x});
  ASSERT_EQ(names_in(lists, 0, lists.calls.size()), (std::vector<std::string>{"view", "add_"}));
  EXPECT_TRUE(lists.calls[1].has_effect);
  EXPECT_EQ(lists.calls[1].outputs, lists.calls[0].outputs) << "it returns what it has written to";
  EXPECT_TRUE(lists.inputs[0].is_written) << "through a view of it";
  EXPECT_FALSE(lists.own[0].is_written);
  EXPECT_EQ(lists.outputs, std::vector<int32_t>{lists.inputs[0].slot});
}

TEST_F(RecordedTape, ListsNumbersAndMissingTensorsKeepTheirPlaces) {
  const at::Tensor x = input();
  at::Tensor wrapped = at::scalar_tensor(0.5, at::kDouble);
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  const at::Tensor joined = call("aten::cat", "", {std::vector<at::Tensor>{x, x}, 0});
  const TapeLists lists = lists_of({call("aten::mul", "Tensor", {joined, wrapped})});
  ASSERT_EQ(lists.calls[0].lists.size(), 1U);
  EXPECT_EQ(lists.calls[0].lists[0].slots, (std::vector<int32_t>{lists.inputs[0].slot, lists.inputs[0].slot}));
  EXPECT_EQ(lists.calls[0].arguments[1].toInt(), 0);
  EXPECT_EQ(lists.calls[1].tensors.size(), 1U);
  EXPECT_TRUE(lists.calls[1].arguments[1].toTensor().is_same(wrapped)) << "a number in the form of a tensor is an argument";
}

TEST_F(RecordedTape, TheLeavesOfARandomOperatorDrawUnderOneSeed) {
  const at::Tensor x = input();
  const TapeLists lists = lists_of({call("aten::neg", "", {call("aten::dropout", "", {x, 0.5, true}, 4)})});
  EXPECT_TRUE(lists.has_random);
  int num_begins = 0, num_ends = 0;
  for (const TapeCall& each : lists.calls) {
    num_begins += each.random_ordinal == 4;
    num_ends += each.ends_random;
    if (name_of(each) != "neg") {
      EXPECT_TRUE(each.has_effect) << name_of(each) << " may leave";
    }
  }
  EXPECT_EQ(num_begins, 1);
  EXPECT_EQ(num_ends, 1);
  EXPECT_EQ(lists.calls.front().random_ordinal, 4);
  EXPECT_FALSE(lists.calls.back().has_effect || lists.calls.back().ends_random);
}

TEST_F(RecordedTape, WhatIsReadFromNowhereIsRefusedAndTheResultIsRight) {
  const at::Tensor x = input(), stranger = at::ones({2, 3});
  expect_bit_equal(call("aten::add", "Tensor", {x, stranger, 1}), x.add(1), "sum");
  EXPECT_EQ(recorder_.refusal(), "aten::add reads a tensor of unknown origin, sizes [2, 3]");
  call("aten::nonzero", "", {x});
  EXPECT_EQ(recorder_.refusal(), "aten::add reads a tensor of unknown origin, sizes [2, 3]") << "the first counts";
}

TEST_F(RecordedTape, OperatorsWhoseResultDependsOnValuesAreRefused) {
  call("aten::masked_select", "", {input(), entered(1, at::ones({2, 3}, at::kBool))});
  EXPECT_EQ(recorder_.refusal(), "aten::masked_select reads values, or replaces memory");
}

TEST_F(RecordedTape, TensorsWithoutStridesAreRefused) {
  call("aten::neg", "", {call("aten::to_sparse", "", {input(), c10::IValue(), c10::IValue(), c10::IValue()})});
  EXPECT_NE(recorder_.refusal(), "");
}

TEST_F(RecordedTape, RandomNumbersOfABackwardAreRefused) {
  recorder_.end_forward({input()});
  recorder_.begin_backward({at::ones({2, 3})});
  recorder_.run_backward([] { at::rand({2}); });
  EXPECT_EQ(recorder_.refusal(), "aten::rand draws random numbers in the backward");
}

TEST_F(RecordedTape, ABackwardUnderAutocastIsRefused) {
  recorder_.end_forward({input()});
  recorder_.begin_backward({at::ones({2, 3})});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  recorder_.run_backward([] {});
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(recorder_.refusal(), "autocast is on where the step is called");
}

/// The second of two stages, forward and backward.
class RecordedStage : public ::testing::Test {
 protected:
  void SetUp() override {
    TapeRecorder recorder = stage_.recorder();
    left_ = stage_.run_autograd({TwoLayers::input(1)}, {}, &recorder);
    ASSERT_EQ(recorder.refusal(), "");
    lists_ = recorder.take();
  }
  const std::string& operator_of(const TapeCall& call) const {
    return stage_.graph.nodes.at(static_cast<size_t>(call.node)).op;
  }

  WatchedStage stage_ = second_of_two();
  Left left_;
  TapeLists lists_;
};

TEST_F(RecordedStage, WatchingChangesNoNumber) {
  const Left alone = stage_.run_autograd({TwoLayers::input(1)});
  expect_bit_equal(left_.outputs, alone.outputs, "loss");
  expect_bit_equal(left_.results, alone.results, "gradient of the input");
  ASSERT_EQ(left_.gradients.size(), 2U);
}

TEST_F(RecordedStage, ForwardAndBackwardAreInTheOrderInWhichTheyRan) {
  EXPECT_EQ(names_in(lists_, 0, lists_.forward_end),
            (std::vector<std::string>{"view", "addmm", "leaky_relu", "mul", "sum"}));
  ASSERT_EQ(lists_.backwards.size(), 1U);
  EXPECT_EQ(lists_.backwards[0].end, lists_.calls.size());
  std::vector<std::string> leaves;
  for (const std::string& name : names_in(lists_, lists_.forward_end, lists_.calls.size())) {
    if (name != "view") leaves.push_back(name);
  }
  EXPECT_EQ(leaves, (std::vector<std::string>{"mul", "mul", "leaky_relu_backward", "add_", "mm", "mm", "sum", "gradient",
                                              "gradient"}));
}

TEST_F(RecordedStage, EachCallOfTheBackwardKnowsWhoseItIs) {
  for (size_t n = lists_.forward_end; n < lists_.calls.size(); ++n) {
    const TapeCall& call = lists_.calls[n];
    if (name_of(call) == "leaky_relu_backward") {
      EXPECT_EQ(operator_of(call), "aten::leaky_relu");
    }
    if (name_of(call) == "mm" || call.kind == Kind::kGradient) {
      EXPECT_EQ(operator_of(call), "aten::linear");
    }
    if (name_of(call) == "mul") {
      EXPECT_EQ(operator_of(call), "aten::mul");
    }
  }
  EXPECT_EQ(operator_of(lists_.calls[lists_.forward_end]), "aten::sum") << "a sum's backward expands its gradient";
}

TEST_F(RecordedStage, TheBackwardReadsWhatTheForwardHasMade) {
  const auto forward_call = [&](const std::string& name) {
    return *std::find_if(lists_.calls.begin(), lists_.calls.end(),
                         [&](const TapeCall& call) { return name_of(call) == name; });
  };
  const int32_t linear = forward_call("addmm").outputs[0], active = forward_call("leaky_relu").outputs[0];
  std::set<int32_t> read;
  for (size_t n = lists_.forward_end; n < lists_.calls.size(); ++n) {
    for (const auto& tensor : lists_.calls[n].tensors) {
      if (name_of(lists_.calls[n]) == "mul") read.insert(tensor.slot);
    }
  }
  EXPECT_TRUE(read.contains(linear) && read.contains(active)) << "the factors";
}

TEST_F(RecordedStage, GradientsOfParametersAndInputsAreNamed) {
  std::set<std::string> parameters;
  for (const TapeCall& call : lists_.calls) {
    if (call.kind != Kind::kGradient) continue;
    const TapeOwn& own = lists_.own.at(static_cast<size_t>(call.parameter));
    parameters.insert(stage_.graph.values[static_cast<size_t>(own.value)].name);
    EXPECT_EQ(lists_.slot_geometries[static_cast<size_t>(call.tensors[0].slot)].sizes, geometry_of(own.tensor).sizes);
  }
  EXPECT_EQ(parameters, (std::set<std::string>{"fc.bias", "fc.weight"}));
  const TapeBackward& backward = lists_.backwards[0];
  ASSERT_EQ(backward.results.size(), 1U);
  EXPECT_TRUE(fits(left_.results[0], lists_.slot_geometries[static_cast<size_t>(backward.results[0])]));
  EXPECT_EQ(backward.has_root, std::vector<bool>{true});
  EXPECT_GE(backward.roots[0], 0);
}

}  // namespace
}  // namespace smp::runtime
