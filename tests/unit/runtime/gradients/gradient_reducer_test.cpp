// Averages of gradients over replicas: where they are made, and what is left when a reduction fails half way.
#include "runtime/gradients/gradient_reducer.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <stdexcept>

#include "tests/support/bits.h"
#include "tests/support/loopback_world.h"

namespace smp::runtime {
namespace {

// The other replica leaves before the bucket does.
TEST(GradientReducer, ThatFailsLeavesEveryGradientAsItWas) {
  at::Tensor with = torch::ones({3}), without = torch::ones({2});
  with.mutable_grad() = torch::full({3}, 7.0);
  const auto run = [&](Transport& replicas) {
    const std::vector<at::Tensor> parameters =
        replicas.rank() == 0 ? std::vector{with, without} : std::vector{torch::ones({3}), torch::ones({2})};
    GradientReducer reducer(parameters, replicas, {.shares_memory = false, .overlap = false});
    if (replicas.rank() == 1) throw std::runtime_error("gone");
    reducer.begin(replicas.size());
    reducer.finish();
  };
  EXPECT_THROW(tests::run_ranks(2, run), std::runtime_error);
  support::expect_bit_equal(with.grad(), torch::full({3}, 7.0), "its gradient");
  EXPECT_FALSE(without.grad().defined());
}

// Ranks share memory of the host, which one parameter of another device cannot be summed in.
TEST(GradientReducer, SharesMemoryOnlyWhereAllParametersAreOnTheHost) {
  tests::run_ranks(2, [](Transport& replicas) {
    const at::Tensor here = torch::ones({3}), elsewhere = torch::ones({3}, torch::kMeta);
    const ReducerOptions options{.shares_memory = true, .overlap = false};
    EXPECT_GT(GradientReducer({here}, replicas, options).shared_bytes(), 0);
    EXPECT_EQ(GradientReducer({here, elsewhere}, replicas, options).shared_bytes(), 0);
  });
}

}  // namespace
}  // namespace smp::runtime
