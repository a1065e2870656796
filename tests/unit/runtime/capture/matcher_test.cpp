// A matcher alone: what it takes for the recorded call, what it keeps of a difference, and that what does not match changes
// nothing.
#include "runtime/capture/matcher.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <functional>

#include "runtime/capture/interceptor.h"
#include "runtime/capture/recorder.h"

namespace smp::runtime {
namespace {

using Tensors = std::vector<at::Tensor>;
using OneBody = std::function<at::Tensor(const at::Tensor& argument)>;

std::shared_ptr<Recording> record(const Bindings& bindings, const OneBody& body) {
  Recorder recorder(bindings, begin_ghost_run());
  const Tensors inputs = recorder.start({torch::ones({4, 8})});
  at::Tensor returned;
  {
    const InterceptScope scope(recorder);
    returned = body(inputs[0]);
  }
  return recorder.finish({recorder.value_of(returned, "the result")}, "");
}

/// Answers the calls that match; ends the body at the first that does not.
class MatchedRun : public Interceptor {
 public:
  explicit MatchedRun(const Bindings& bindings) : matcher(bindings) {}

  bool equals(const std::shared_ptr<Recording>& recording, const OneBody& body) {
    const Tensors inputs = matcher.start(recording, begin_ghost_run());
    const InterceptScope scope(*this);
    try {
      const at::Tensor returned = body(inputs[0]);
      return matcher.matches_end({returned}, 0);
    } catch (const Differs&) {
      return false;
    }
  }

  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    if (!matcher.matches_call(op, stack)) {
      const auto others = on_difference ? on_difference() : std::vector<std::shared_ptr<Recording>>{};
      const auto goes_on = [&] { return matcher.matches_call(op, stack); };
      if (others.empty() || matcher.switch_to_one_of(others, 0, goes_on) == nullptr) throw Differs();
    }
    matcher.answer(stack);
  }

  Matcher matcher;
  std::function<std::vector<std::shared_ptr<Recording>>()> on_difference;

 private:
  struct Differs {};
};

class MatchedBody : public testing::Test {
 protected:
  const Bindings bindings_;
  const at::Tensor constant_ = torch::full({8}, 3.0);
  const OneBody body_ = [this](const at::Tensor& x) { return (x * 2 + constant_).sum(); };
  const std::shared_ptr<Recording> recording_ = record(bindings_, body_);
  MatchedRun run_{bindings_};
};

TEST_F(MatchedBody, AnswersTheSameCallsWithGhostsOfTheSameGeometry) {
  EXPECT_TRUE(run_.equals(recording_, [&](const at::Tensor& x) {
    const at::Tensor scaled = x * 2;
    EXPECT_NE(as_ghost(scaled), nullptr);
    EXPECT_EQ(scaled.sizes(), x.sizes());
    return (scaled + constant_).sum();
  }));
  EXPECT_TRUE(run_.matcher.match().run.scalars.empty());
  EXPECT_TRUE(run_.matcher.match().run.constants.empty());
}

TEST_F(MatchedBody, KeepsAnotherNumberAndAnotherConstant) {
  const at::Tensor other = torch::full({8}, 4.0);
  ASSERT_TRUE(run_.equals(recording_, [&](const at::Tensor& x) { return (x * 5 + other).sum(); }));
  ASSERT_EQ(run_.matcher.match().run.scalars.size(), 1U);
  ASSERT_EQ(run_.matcher.match().run.constants.size(), 1U);
  EXPECT_TRUE(run_.matcher.match().run.constants[0].tensor.equal(other));
}

TEST_F(MatchedBody, KeepsNothingOfACallThatDoesNotMatch) {
  const at::Tensor wrong_size = torch::full({4, 8}, 3.0);
  EXPECT_FALSE(run_.equals(recording_, [&](const at::Tensor& x) { return (x * 2 + wrong_size).sum(); }));
  EXPECT_EQ(run_.matcher.match().position, 1);
  EXPECT_TRUE(run_.matcher.match().used.empty());
  EXPECT_TRUE(run_.matcher.match().run.constants.empty());
}

TEST_F(MatchedBody, KeepsNothingOfArgumentsBeforeTheOneThatDoesNotMatch) {
  const auto product = record(bindings_, [this](const at::Tensor& x) {
    const at::Tensor scaled = x * 2;
    return constant_ * scaled;
  });
  const at::Tensor other = torch::full({8}, 4.0);
  EXPECT_FALSE(run_.equals(product, [&](const at::Tensor& x) {
    const at::Tensor scaled = x * 2;
    return other * x;
  }));
  EXPECT_TRUE(run_.matcher.match().run.constants.empty());
  EXPECT_TRUE(run_.matcher.match().used.empty());
}

TEST_F(MatchedBody, DoesNotTakeAnotherTensorOperatorOrEnd) {
  EXPECT_FALSE(run_.equals(recording_, [&](const at::Tensor& x) { return (x - constant_).sum(); }));
  MatchedRun on_itself(bindings_);
  EXPECT_FALSE(on_itself.equals(recording_, [&](const at::Tensor& x) { return (x * 2 + x).sum(); }));
  MatchedRun ends_early(bindings_);
  EXPECT_FALSE(ends_early.equals(recording_, [&](const at::Tensor& x) { return x * 2 + constant_; }));
}

TEST_F(MatchedBody, DoesNotTakeAGhostOfAnotherRun) {
  at::Tensor kept;
  MatchedRun first(bindings_);
  ASSERT_TRUE(first.equals(recording_, [&](const at::Tensor& x) {
    kept = x;
    return body_(x);
  }));
  EXPECT_FALSE(run_.equals(recording_, [&](const at::Tensor&) { return body_(kept); }));
}

TEST_F(MatchedBody, GoesOnWithARecordingThatBeganInTheSameWay) {
  const auto other = record(bindings_, [this](const at::Tensor& x) { return (x * 2 + constant_).mean(); });
  run_.on_difference = [&] { return std::vector{recording_, other}; };
  EXPECT_TRUE(run_.equals(recording_, [&](const at::Tensor& x) { return (x * 3 + constant_).mean(); }));
  EXPECT_EQ(run_.matcher.match().recording, other);
  EXPECT_EQ(run_.matcher.match().run.recording, other);
  EXPECT_EQ(run_.matcher.match().run.scalars.size(), 1U) << "the number that differed before the switch";
}

TEST_F(MatchedBody, StaysWhereItWasWhenNoOtherRecordingGoesOn) {
  const auto other = record(bindings_, [this](const at::Tensor& x) { return (x * 2 + constant_).mean(); });
  run_.on_difference = [&] { return std::vector{recording_, other}; };
  EXPECT_FALSE(run_.equals(recording_, [&](const at::Tensor& x) { return (x * 3 + constant_).prod(); }));
  EXPECT_EQ(run_.matcher.match().recording, recording_);
  EXPECT_EQ(run_.matcher.match().position, 2);
  EXPECT_EQ(run_.matcher.match().run.scalars.size(), 1U);
  EXPECT_EQ(run_.matcher.match().used.size(), 1U);
}

}  // namespace
}  // namespace smp::runtime
