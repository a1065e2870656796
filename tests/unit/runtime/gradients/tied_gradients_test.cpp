// Gradients of tied weights: what they are added to, and what is left when a step fails half way.
#include "runtime/gradients/tied_gradients.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <stdexcept>

#include "runtime/transport/error.h"
#include "tests/support/bits.h"
#include "tests/support/loopback_world.h"

namespace smp::runtime {
namespace {

using partitioner::ValueKind;

struct Weights {
  at::Tensor tied = torch::ones({3}).requires_grad_();
  at::Tensor own = torch::ones({2}).requires_grad_();
  Bindings bindings{{{ValueKind::kParameter, "tied", tied}, {ValueKind::kParameter, "own", own}}};
  TensorHomes homes{{"tied", {{0, 1}}}, {"own", {{0}}}};
};

TiedGradients::TrainedOn only_on(const std::vector<int>& ranks) {
  return [ranks](const std::string&) { return ranks; };
}

/// As microbatches add their gradients. Each addition rounds, so what `sum` begins with tells in the last bits.
at::Tensor added_one_by_one(at::Tensor sum) {
  for (int microbatch = 0; microbatch < 50; ++microbatch) sum += 0.1;
  return sum;
}

TEST(TiedGradients, OfEarlierStepsComeBackWhenTheStepFails) {
  tests::run_ranks(2, [](Transport& pipeline) {
    Weights weights;
    weights.tied.mutable_grad() = torch::full({3}, 7.0);
    try {
      const TiedGradients tied(weights.homes, weights.bindings, only_on({0, 1}), pipeline);
      EXPECT_FALSE(weights.tied.grad().defined());
      weights.tied.mutable_grad() = torch::full({3}, 100.0);  // of the step that fails
      throw std::runtime_error("the step");
    } catch (const std::runtime_error&) {
    }
    support::expect_bit_equal(weights.tied.grad(), torch::full({3}, 7.0), "accumulated");
  });
}

TEST(TiedGradients, OfAnotherRankThatIsGoneLeaveTheEarlierOnes) {
  at::Tensor left;
  const auto run = [&](Transport& pipeline) {
    if (pipeline.rank() == 1) throw std::runtime_error("gone");
    Weights weights;
    weights.tied.mutable_grad() = torch::full({3}, 7.0);
    try {
      TiedGradients tied(weights.homes, weights.bindings, only_on({0, 1}), pipeline);
      weights.tied.mutable_grad() = torch::full({3}, 100.0);
      tied.finish();
    } catch (const CommError&) {
      left = weights.tied.grad();
      throw;
    }
  };
  EXPECT_THROW(tests::run_ranks(2, run), std::runtime_error);
  support::expect_bit_equal(left, torch::full({3}, 7.0), "accumulated");
}

TEST(TiedGradients, AreSummedOnceAndAddedToTheEarlierOnes) {
  tests::run_ranks(2, [](Transport& pipeline) {
    Weights weights;
    weights.tied.mutable_grad() = torch::full({3}, 7.0);
    {
      TiedGradients tied(weights.homes, weights.bindings, only_on({0, 1}), pipeline);
      weights.tied.mutable_grad() = torch::full({3}, 1.0 + pipeline.rank());
      tied.finish();
    }
    support::expect_bit_equal(weights.tied.grad(), torch::full({3}, 10.0), "sum");
  });
}

TEST(TiedGradients, OfOneRankThatTrainsAreAddedInTheOrderOfALoop) {
  const at::Tensor want = added_one_by_one(torch::full({3}, 7.0));
  ASSERT_FALSE(want.equal(7.0 + added_one_by_one(torch::zeros({3}))));
  tests::run_ranks(2, [&](Transport& pipeline) {
    Weights weights;
    weights.tied.mutable_grad() = torch::full({3}, 7.0);
    {
      TiedGradients tied(weights.homes, weights.bindings, only_on({1}), pipeline);
      if (pipeline.rank() == 1) added_one_by_one(weights.tied.mutable_grad());
      tied.finish();
    }
    support::expect_bit_equal(weights.tied.grad(), want, "sum");
  });
}

TEST(TiedGradients, OfOneRankThatTrainsComeBackWhenTheStepFails) {
  tests::run_ranks(2, [](Transport& pipeline) {
    Weights weights;
    weights.tied.mutable_grad() = torch::full({3}, 7.0);
    try {
      const TiedGradients tied(weights.homes, weights.bindings, only_on({1}), pipeline);
      if (pipeline.rank() == 1) added_one_by_one(weights.tied.mutable_grad());
      throw std::runtime_error("the step");
    } catch (const std::runtime_error&) {
    }
    support::expect_bit_equal(weights.tied.grad(), torch::full({3}, 7.0), "accumulated");
  });
}

TEST(TiedGradients, OfOneRankThatTrainsForTheFirstTimeReachTheOthers) {
  tests::run_ranks(2, [](Transport& pipeline) {
    Weights weights;
    {
      TiedGradients tied(weights.homes, weights.bindings, only_on({1}), pipeline);
      if (pipeline.rank() == 1) weights.tied.mutable_grad() = torch::full({3}, 2.0);
      tied.finish();
    }
    support::expect_bit_equal(weights.tied.grad(), torch::full({3}, 2.0), "sum");
  });
}

}  // namespace
}  // namespace smp::runtime
