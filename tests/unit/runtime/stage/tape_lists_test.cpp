// Geometries of taped tensors, views past the dispatcher, and the calls that a tape does without.
#include "runtime/stage/tape_lists.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <string>

#include "runtime/stage/unused_calls.h"
#include "tests/support/bits.h"
#include "tests/unit/runtime/stage/hand_made_tape.h"

namespace smp::runtime {
namespace {

using support::expect_bit_equal;

TEST(TapeGeometry, FitsTensorsThatLieInMemoryInTheSameWay) {
  const at::Tensor numbers = at::arange(12, at::kFloat).reshape({3, 4});
  const partitioner::TensorSpec geometry = geometry_of(numbers);
  EXPECT_TRUE(fits(numbers, geometry) && fits(at::ones({3, 4}), geometry));
  EXPECT_EQ(geometry, geometry_of(at::ones({3, 4})));
  const at::Tensor longer = at::ones({13}), complex = at::ones({3, 4}, at::kComplexFloat);
  for (const at::Tensor& other :
       {at::ones({4, 3}), at::ones({4, 3}).t(), at::ones({3, 4}, at::kInt), longer.slice(0, 1).view({3, 4}), at::Tensor()}) {
    EXPECT_FALSE(fits(other, geometry)) << other.toString();
  }
  EXPECT_FALSE(fits(numbers.to_sparse(), geometry));
  EXPECT_TRUE(fits(complex, geometry_of(complex)));
  EXPECT_FALSE(fits(complex.conj(), geometry_of(complex))) << "lazily conjugated";
}

TEST(ViewOf, IsAnotherTensorOnTheSameMemoryWithItsVersion) {
  const at::Tensor base = at::arange(12, at::kFloat).reshape({3, 4});
  const at::Tensor column = base.select(1, 2), view = view_of(base, geometry_of(column));
  expect_bit_equal(view, column, "view");
  EXPECT_TRUE(view.is_alias_of(base) && !view.is_same(base));
  base.mul_(2);
  expect_bit_equal(view, column, "after a write");
  EXPECT_EQ(view._version(), base._version());
}

using stage_graphs::HandMadeTape;
using Names = std::vector<std::string>;

TEST_F(HandMadeTape, DropsWhatNobodyUsesWithAllThatOnlyThatHasUsed) {
  const int32_t x = slot(), a = slot(), b = slot(), v = slot(), y = slot();
  call("aten::mul", "Tensor", {x, x}, {a});
  call("aten::neg", "", {a}, {b});
  view(b, v);
  call("aten::add", "Tensor", {x, x}, {y});
  lists_.outputs = {y};
  lists_.forward_end = 4;
  drop_unused(lists_);
  EXPECT_EQ(names(), Names{"add"});
  EXPECT_EQ(lists_.forward_end, 1U);
}

TEST_F(HandMadeTape, KeepsWhatHasAnEffectOrMayThrow) {
  const int32_t x = slot(), integers = slot(at::ones({4}, at::kLong)), unused = slot(), selected = slot(),
                quotient = slot(at::ones({4}, at::kLong));
  call("aten::add_", "Tensor", {x, x}, {unused}).has_effect = true;
  call("aten::index_select", "", {x, integers}, {selected});
  call("aten::div", "Tensor_mode", {integers, integers}, {quotient});
  call("aten::mul", "Tensor", {integers, integers}, {-1});
  drop_unused(lists_);
  EXPECT_EQ(names(), (Names{"add_", "index_select", "div"})) << "an index may be out of range, a divisor zero";
}

TEST_F(HandMadeTape, KeepsGradientsOfParametersAndWhatTheyNeed) {
  const int32_t root = slot(), of_parameter = slot(), other = slot(), result = slot();
  call("aten::neg", "", {root}, {of_parameter});
  call("aten::neg", "", {root}, {other});
  gradient(of_parameter);
  call("aten::neg", "", {root}, {result});
  lists_.backwards.resize(1);
  lists_.backwards[0].end = 4;
  lists_.backwards[0].results = {-1, result};
  drop_unused(lists_);
  EXPECT_EQ(names(), (Names{"neg", "gradient", "neg"}));
  EXPECT_EQ(lists_.backwards[0].end, 3U);
}

TEST_F(HandMadeTape, AViewOfAViewIsOneOfItsBase) {
  const at::Tensor whole = at::ones({4, 4});
  const int32_t base = slot(whole), row = slot(whole[0]), half = slot(whole[0].slice(0, 2)), y = slot();
  view(base, row);
  view(row, half);
  call("aten::neg", "", {half}, {y});
  lists_.outputs = {y};
  fold_views(lists_, fixed_);
  EXPECT_EQ(lists_.calls[1].tensors[0].slot, base);
  drop_unused(lists_);
  EXPECT_EQ(names(), (Names{"view", "neg"}));
}

TEST_F(HandMadeTape, AViewLikeItsBaseIsItsBase) {
  const int32_t x = slot(), same = slot(), y = slot();
  view(x, same);
  call("aten::cat", "", {}, {y}).lists = {{.position = 0, .slots = {same, -1, x}}};
  lists_.outputs = {y, same};
  fold_views(lists_, fixed_);
  drop_unused(lists_);
  EXPECT_EQ(names(), Names{"cat"});
  EXPECT_EQ(lists_.calls[0].lists[0].slots, (std::vector<int32_t>{x, -1, x}));
  EXPECT_EQ(lists_.outputs, (std::vector<int32_t>{y, x}));
}

TEST_F(HandMadeTape, AViewLikeItsBaseStaysWhereGeometriesChangeInPlace) {
  const int32_t x = slot(), same = slot();
  view(x, same);
  lists_.outputs = {same};
  lists_.changes_geometry_in_place = true;
  fold_views(lists_, fixed_);
  drop_unused(lists_);
  EXPECT_EQ(names(), Names{"view"});
}

TEST_F(HandMadeTape, FixedTensorsAndTheirViewsBecomeArguments) {
  const at::Tensor weight = at::arange(12, at::kFloat).reshape({3, 4});
  const int32_t fixed = slot(weight), transposed = slot(weight.t()), x = slot(), y = slot();
  lists_.own.push_back({{.value = 0, .slot = fixed}, weight, true});
  view(fixed, transposed);
  call("aten::mm", "", {x, transposed}, {y});
  lists_.outputs = {y};
  fold_views(lists_, fixed_);
  drop_unused(lists_);
  EXPECT_EQ(names(), Names{"mm"});
  ASSERT_EQ(lists_.calls[0].tensors.size(), 1U);
  EXPECT_EQ(lists_.calls[0].tensors[0].slot, x);
  const at::Tensor baked = lists_.calls[0].arguments[1].toTensor();
  expect_bit_equal(baked, weight.t(), "argument");
  EXPECT_TRUE(baked.is_alias_of(weight));
}

TEST_F(HandMadeTape, AConstantOfThisRunIsNoFixedTensor) {
  const at::Tensor constant = at::ones({4});
  const int32_t own = slot(constant), y = slot();
  lists_.own.push_back({{.value = 0, .slot = own}, constant, false});
  call("aten::neg", "", {own}, {y});
  fold_views(lists_, fixed_);
  ASSERT_EQ(lists_.calls[0].tensors.size(), 1U) << "another microbatch has another";
}

}  // namespace
}  // namespace smp::runtime
