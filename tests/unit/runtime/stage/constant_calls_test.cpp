// Which calls of a tape run once, when it is made.
#include "runtime/stage/constant_calls.h"

#include <ATen/core/Scalar.h>
#include <gtest/gtest.h>

#include "tests/support/bits.h"
#include "tests/unit/runtime/stage/hand_made_tape.h"

namespace smp::runtime {
namespace {

using support::expect_bit_equal;
using Names = std::vector<std::string>;

class ConstantCalls : public stage_graphs::HandMadeTape {
 protected:
  // full({4}, number)
  TapeCall& full(double number, int32_t made) {
    TapeCall& added = call("aten::full", "", {}, {made});
    added.arguments = {std::vector<int64_t>{4}, number, c10::IValue(), c10::IValue(), c10::IValue(), c10::IValue()};
    return added;
  }
  TapeCall& scaled(const char* name, int32_t read, int32_t made) {
    TapeCall& added = call(name, "Scalar", {read}, {made});
    added.arguments.emplace_back(3.0);
    return added;
  }
  void fold() { fold_constants(lists_, fixed_, /*takes_host_tensors=*/true); }
  const at::Tensor& fixed(int32_t slot) const { return fixed_[static_cast<size_t>(slot)]; }
};

TEST_F(ConstantCalls, RunOnceWithTheirViews) {
  const int32_t x = slot(), first = slot(), a = slot(), v = slot(), b = slot(), y = slot();
  lists_.slot_memories[static_cast<size_t>(v)] = a;
  lists_.inputs.push_back({.slot = x});
  full(2, first);
  scaled("aten::mul", first, a);
  view(a, v);
  scaled("aten::mul", v, b);
  call("aten::add", "Tensor", {x, b}, {y}).arguments.emplace_back(1);
  lists_.outputs = {y};
  lists_.forward_end = lists_.calls.size();
  fold();
  EXPECT_EQ(names(), Names{"add"});
  EXPECT_EQ(lists_.forward_end, 1U);
  expect_bit_equal(fixed(b), at::ones({4}).mul(18), "folded");
  for (const int32_t other : {x, first, a, v, y}) EXPECT_FALSE(fixed(other).defined()) << "kept for nobody: " << other;
}

// An operator that returns nothing writes as well, and so do those of a list; what is beside a written result stays with it.
TEST_F(ConstantCalls, StayWithAllOnMemoryThatAListWritesTo) {
  const int32_t x = slot(), a = slot(), b = slot(), y = slot();
  lists_.inputs.push_back({.slot = x});
  full(2, a);
  TapeCall& scaled_in_place = call("aten::_foreach_mul_", "Scalar", {}, {});
  scaled_in_place.arguments = {c10::IValue(), 2.0};
  scaled_in_place.lists.push_back({.position = 0, .slots = {a}});
  scaled_in_place.has_effect = true;
  scaled("aten::mul", a, b);
  call("aten::add", "Tensor", {x, b}, {y}).arguments.emplace_back(1);
  lists_.outputs = {y};
  lists_.forward_end = lists_.calls.size();
  fold();
  EXPECT_EQ(names(), (Names{"full", "_foreach_mul_", "mul", "add"}));
}

TEST_F(ConstantCalls, StayWhereTheyDependOnAnInputOrATensorOfTheStageOrDraw) {
  const int32_t x = slot(), w = slot(), a = slot(), b = slot(), c = slot(), d = slot(), e = slot();
  lists_.inputs.push_back({.slot = x});
  TapeOwn own;
  own.slot = w;
  own.tensor = at::ones({4});
  lists_.own.push_back(own);
  scaled("aten::mul", x, a);
  scaled("aten::mul", w, b);
  full(1, c).random_ordinal = 0;  // as the first of some that draw
  scaled("aten::mul", c, d).ends_random = true;
  scaled("aten::mul", d, e);
  lists_.outputs = {a, b, e};
  lists_.forward_end = lists_.calls.size();
  fold();
  EXPECT_EQ(names(), (Names{"mul", "mul", "full", "mul", "mul"}));
}

// Each microbatch finds it as its own first call has made it.
TEST_F(ConstantCalls, StayWhereSomebodyWritesToWhatTheyMade) {
  const int32_t x = slot(), written = slot(), handed = slot(), in_backward = slot(), read = slot(), y = slot();
  lists_.inputs.push_back({.slot = x});
  full(1, written);
  full(2, handed);
  full(3, in_backward);
  full(4, read);
  call("aten::add_", "Tensor", {written, x}, {written}).has_effect = true;
  lists_.calls.back().arguments.emplace_back(1);
  call("aten::add_", "Tensor", {x, read}, {x}).has_effect = true;  // which writes to the first alone
  lists_.calls.back().arguments.emplace_back(1);
  call("aten::add", "Tensor", {x, written}, {y}).arguments.emplace_back(1);
  lists_.outputs = {y, handed};
  lists_.forward_end = lists_.calls.size();
  scaled("aten::mul_", in_backward, in_backward).has_effect = true;
  lists_.backwards.emplace_back().end = lists_.calls.size();
  fold();
  EXPECT_EQ(names(), (Names{"full", "full", "add_", "add_", "add", "mul_"}));
  EXPECT_EQ(lists_.backwards[0].end, 6U);
  expect_bit_equal(fixed(handed), at::ones({4}).mul(2), "handed out");
  expect_bit_equal(fixed(read), at::ones({4}).mul(4), "read");
}

}  // namespace
}  // namespace smp::runtime
