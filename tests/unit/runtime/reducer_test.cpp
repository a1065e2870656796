// Gradients when a step or a reduction fails half way.
#include "runtime/reducer.h"

#include <gtest/gtest.h>

#include <mutex>
#include <stdexcept>

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
  Owners owners{{"tied", {0, 1}}, {"own", {0}}};
};

TEST(TiedGradients, OfEarlierStepsComeBackWhenTheStepFails) {
  tests::run_ranks(2, [](Transport& pipeline) {
    Weights weights;
    weights.tied.mutable_grad() = torch::full({3}, 7.0);
    try {
      const TiedGradients tied(weights.owners, weights.bindings, pipeline);
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
      TiedGradients tied(weights.owners, weights.bindings, pipeline);
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
      TiedGradients tied(weights.owners, weights.bindings, pipeline);
      weights.tied.mutable_grad() = torch::full({3}, 1.0 + pipeline.rank());
      tied.finish();
    }
    support::expect_bit_equal(weights.tied.grad(), torch::full({3}, 10.0), "sum");
  });
}

// The other replica leaves after the first of the two messages of average_gradients.
TEST(AverageGradients, ThatFailLeaveEveryGradientAsItWas) {
  Weights weights;
  weights.tied.mutable_grad() = torch::full({3}, 7.0);
  EXPECT_ANY_THROW(tests::run_ranks(2, [&](Transport& replicas) {
    if (replicas.rank() == 0) {
      average_gradients({weights.tied, weights.own}, replicas, 1 << 20, replicas.size());
    } else {
      std::vector<int64_t> have = {1, 1};
      replicas.all_reduce_sum(have.data(), 2, c10::ScalarType::Long);
      throw std::runtime_error("gone");
    }
  }));
  support::expect_bit_equal(weights.tied.grad(), torch::full({3}, 7.0), "its gradient");
  EXPECT_FALSE(weights.own.grad().defined());
}

}  // namespace
}  // namespace smp::runtime
