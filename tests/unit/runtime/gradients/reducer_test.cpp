// Gradients when a step or a reduction fails half way.
#include <gtest/gtest.h>

#include <mutex>
#include <stdexcept>

#include "runtime/gradients/gradient_reducer.h"
#include "runtime/gradients/tied_gradients.h"
#include "tests/support/bits.h"
#include "tests/support/loopback_world.h"
#include "tests/unit/smp/small_net.h"

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
  EXPECT_ANY_THROW(tests::run_ranks(2, [&](Transport& pipeline) {
    if (pipeline.rank() == 1) throw std::runtime_error("gone");
    Weights weights;
    weights.tied.mutable_grad() = torch::full({3}, 7.0);
    try {
      TiedGradients tied(weights.homes, weights.bindings, only_on({0, 1}), pipeline);
      weights.tied.mutable_grad() = torch::full({3}, 100.0);
      tied.finish();
    } catch (...) {
      left = weights.tied.grad();
      throw;
    }
  }));
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

// The other replica leaves before the bucket does.
TEST(GradientReducer, ThatFailsLeavesEveryGradientAsItWas) {
  Weights weights;
  weights.tied.mutable_grad() = torch::full({3}, 7.0);
  EXPECT_ANY_THROW(tests::run_ranks(2, [&](Transport& replicas) {
    const std::vector<at::Tensor> parameters =
        replicas.rank() == 0 ? std::vector{weights.tied, weights.own} : std::vector{torch::ones({3}), torch::ones({2})};
    GradientReducer reducer(parameters, replicas, {.shares_memory = false, .overlap = false});
    if (replicas.rank() == 1) throw std::runtime_error("gone");
    reducer.begin(replicas.size());
    reducer.finish();
  }));
  support::expect_bit_equal(weights.tied.grad(), torch::full({3}, 7.0), "its gradient");
  EXPECT_FALSE(weights.own.grad().defined());
}

}  // namespace
}  // namespace smp::runtime
