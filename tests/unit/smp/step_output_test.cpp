// Reductions over microbatches, by dtype.
#include "smp/step_output.h"

#include <gtest/gtest.h>

#include "tests/support/messages.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::message_of;

TEST(StepOutputs, SumOfBoolsCountsTheTrueOnes) {
  const StepOutput outputs({torch::tensor({true, false}), torch::tensor({true, false}), torch::tensor({true, true})});
  EXPECT_TRUE(torch::equal(outputs.reduce_sum(), torch::tensor({3, 1}, at::kLong)));
}

TEST(StepOutputs, SumOfSmallIntegersDoesNotOverflow) {
  const StepOutput outputs({torch::full({2}, 100, at::kChar), torch::full({2}, 100, at::kChar)});
  EXPECT_TRUE(torch::equal(outputs.reduce_sum(), torch::full({2}, 200, at::kLong)));
}

TEST(StepOutputs, SumAndMeanOfFloatsKeepTheDtypeAndTheEntries) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const StepOutput outputs({torch::full({2}, 1, dtype), torch::full({2}, 4, dtype)});
    EXPECT_TRUE(torch::equal(outputs.reduce_sum(), torch::full({2}, 5, dtype)));
    EXPECT_TRUE(torch::equal(outputs.reduce_mean(), torch::full({2}, 2.5, dtype)));
    EXPECT_TRUE(torch::equal(outputs[0], torch::ones({2}, dtype)));
  }
}

TEST(StepOutputs, SumOfOneMicrobatchIsTheCallersOwn) {
  const StepOutput outputs({torch::zeros({2}, at::kLong)});
  outputs.reduce_sum().add_(1);
  EXPECT_TRUE(torch::equal(outputs[0], torch::zeros({2}, at::kLong)));
}

TEST(StepOutputs, MeanOfIntegersIsRefusedWithTheWayOut) {
  for (const at::ScalarType dtype : {at::kLong, at::kBool}) {
    const StepOutput outputs({torch::ones({}, dtype), torch::ones({}, dtype)});
    const std::string message = message_of<c10::ValueError>([&] { outputs.reduce_mean(); });
    EXPECT_TRUE(contains(message, "reduce_mean") && contains(message, "reduce_sum().to(at::kDouble)")) << message;
  }
}

TEST(StepOutputs, EmptyOnesAreRefusedByName) {
  const StepOutput empty;
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { empty.reduce_mean(); }), "StepOutput::reduce_mean"));
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { empty.reduce_sum(); }), "StepOutput::reduce_sum"));
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { empty.concat(); }), "StepOutput::concat"));
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { empty.stack(); }), "StepOutput::stack"));
}

}  // namespace
}  // namespace smp
