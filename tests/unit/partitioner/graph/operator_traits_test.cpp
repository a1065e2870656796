// The table of traits against the operators of this LibTorch: a name that is none would be a trait that nobody has.
#include "partitioner/graph/operator_traits.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "runtime/capture/operator_info.h"

namespace smp::runtime {
namespace {

using partitioner::Trait;

TEST(OperatorTraits, AreThoseOfOperatorsThatExist) {
  const auto known = c10::Dispatcher::singleton().getAllOpNames();
  for (const std::string_view row : partitioner::operators_with_traits()) {
    const auto stands_for = [row](const c10::OperatorName& op) {
      return op.name == row || (!op.overload_name.empty() && op.name + "." + op.overload_name == row);
    };
    EXPECT_TRUE(std::any_of(known.begin(), known.end(), stands_for)) << row;
  }
}

TEST(OperatorTraits, OfAnOverloadAreNotThoseOfTheOthers) {
  EXPECT_TRUE(has(Trait::kLooksAtNumbers, "aten::narrow", "Tensor"));
  EXPECT_FALSE(has(Trait::kLooksAtNumbers, "aten::narrow"));
  EXPECT_TRUE(has(Trait::kNeverThrows, "aten::add", "Tensor"));
  EXPECT_FALSE(has(Trait::kNeverThrows, "mine::add"));
}

TEST(OperatorTraits, AddWhatTheSchemaLeavesOut) {
  const auto info = [](const char* op) { return operator_info(c10::Dispatcher::singleton().findSchemaOrThrow(op, "")); };
  const OperatorInfo norm = info("aten::batch_norm");
  EXPECT_EQ(std::count(norm.argument_written.begin(), norm.argument_written.end(), true), 2);
  EXPECT_EQ(norm.write_is_hidden, norm.argument_written);
  const OperatorInfo renorm = info("aten::embedding_renorm_");
  EXPECT_EQ(std::count(renorm.argument_written.begin(), renorm.argument_written.end(), true), 1);
  EXPECT_EQ(std::count(renorm.write_is_hidden.begin(), renorm.write_is_hidden.end(), true), 0);
  EXPECT_EQ(info("aten::item").kind, OperatorClass::kReadsValue);
  EXPECT_EQ(info("aten::nonzero").kind, OperatorClass::kDataDependentShape);
  EXPECT_EQ(info("aten::is_inference").kind, OperatorClass::kGeometryQuery);
}

}  // namespace
}  // namespace smp::runtime
