// The order of a last backward: what leaves the stage first, as much of the rest behind it as memory allows, every bit as
// before.
#include "runtime/stage/tape_order.h"

#include <gtest/gtest.h>

#include "tests/unit/runtime/stage/hand_made_tape.h"

namespace smp::runtime {
namespace {

/// A backward that starts with the peak of its memory: from there on calls may wait.
class TapeOrder : public stage_graphs::HandMadeTape {
 protected:
  void begin() { call("aten::mul", "Tensor", {root_, saved_}, {first_}); }
  void put_in_order(const std::vector<int32_t>& results) {
    lists_.backwards.resize(1);
    lists_.backwards[0].results = results;
    lists_.backwards[0].end = lists_.calls.size();
    put_results_first(lists_);
  }
  size_t results_end() const { return lists_.backwards[0].results_end; }

  const at::Tensor large_ = at::ones({4096});
  const int32_t root_ = slot(large_), saved_ = slot(large_), first_ = slot(), weight_ = slot(), result_ = slot();
};
using CallNames = std::vector<std::string>;

TEST_F(TapeOrder, WhatLeavesComesBeforeGradientsOfParameters) {
  begin();
  call("aten::relu", "", {first_}, {weight_});
  gradient(weight_);
  call("aten::neg", "", {first_}, {result_});
  put_in_order({result_});
  EXPECT_EQ(names(), (CallNames{"mul", "neg", "relu", "gradient"}));
  EXPECT_EQ(results_end(), 2U);
  EXPECT_EQ(lists_.backwards[0].end, 4U);
}

TEST_F(TapeOrder, NothingWaitsThatWouldRaiseThePeak) {
  const int32_t large_result = slot(large_);
  call("aten::relu", "", {saved_}, {weight_});
  gradient(weight_);
  call("aten::neg", "", {first_}, {large_result});
  put_in_order({large_result});
  EXPECT_EQ(names(), (CallNames{"relu", "gradient", "neg"})) << "or both large ones are there at once";
  EXPECT_EQ(results_end(), 3U);
}

TEST_F(TapeOrder, ReadersStayBeforeAWriteThatTheResultNeeds) {
  begin();
  call("aten::relu", "", {first_}, {weight_});
  gradient(weight_);
  call("aten::add_", "Tensor", {first_, first_}, {first_}).has_effect = true;
  call("aten::neg", "", {first_}, {result_});
  put_in_order({result_});
  EXPECT_EQ(names(), (CallNames{"mul", "relu", "add_", "neg", "gradient"}));
  EXPECT_EQ(results_end(), 4U);
}

TEST_F(TapeOrder, OfAConvolutionTheGradientOfTheInputIsAskedForFirst) {
  const int32_t bias = slot();
  begin();
  TapeCall& convolution = call("aten::convolution_backward", "", {first_, first_, first_}, {result_, weight_, bias});
  convolution.arguments.resize(11);
  convolution.arguments[10] = c10::List<bool>({true, true, true});
  gradient(weight_);
  gradient(bias);
  put_in_order({result_});
  ASSERT_EQ(names(), (CallNames{"mul", "convolution_backward", "convolution_backward", "gradient", "gradient"}));
  EXPECT_EQ(results_end(), 2U);
  EXPECT_EQ(lists_.backwards[0].end, 5U);
  const auto asked = [&](size_t n) { return lists_.calls[n].arguments[10].toBoolList().vec(); };
  EXPECT_EQ(asked(1), (std::vector<bool>{true, false, false}));
  EXPECT_EQ(asked(2), (std::vector<bool>{false, true, true}));
  EXPECT_EQ(lists_.calls[1].outputs, (std::vector<int32_t>{result_, -1, -1}));
  EXPECT_EQ(lists_.calls[2].outputs, (std::vector<int32_t>{-1, weight_, bias}));
}

TEST_F(TapeOrder, WhereNothingLeavesTheRecordedOrderStays) {
  begin();
  call("aten::relu", "", {first_}, {weight_});
  gradient(weight_);
  call("aten::neg", "", {first_}, {result_});
  put_in_order({-1});
  EXPECT_EQ(names(), (CallNames{"mul", "relu", "gradient", "neg"}));
  EXPECT_EQ(results_end(), 4U);
}

TEST_F(TapeOrder, OnlyTheLastOfSeveralBackwardsIsPutInOrder) {
  lists_.backwards.resize(2);
  for (const int32_t result : {slot(), result_}) {
    begin();
    call("aten::relu", "", {first_}, {weight_});
    gradient(weight_);
    call("aten::neg", "", {first_}, {result});
    TapeBackward& backward = lists_.backwards[result == result_ ? 1 : 0];
    backward.end = lists_.calls.size();
    backward.results = {result};
  }
  put_results_first(lists_);
  EXPECT_EQ(names(), (CallNames{"mul", "relu", "gradient", "neg", "mul", "neg", "relu", "gradient"}));
  EXPECT_EQ(lists_.backwards[0].results_end, 4U);
  EXPECT_EQ(lists_.backwards[1].results_end, 6U);
}

}  // namespace
}  // namespace smp::runtime
