// Averages of gradients over replicas: when buckets leave, what becomes of gradients, and what is left when a sum fails.
#include "runtime/gradients/gradient_reducer.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <stdexcept>

#include "tests/support/bits.h"
#include "tests/support/loopback_world.h"
#include "tests/support/messages.h"

namespace smp::runtime {
namespace {

// What the caller has set apart from the step: how many bytes a bucket has does not matter to the result.
ReducerOptions small_buckets(bool overlap) { return {.bucket_bytes = 24, .overlap = overlap}; }

std::vector<at::Tensor> leaves(int count) {
  std::vector<at::Tensor> made;
  for (int i = 0; i < count; ++i) made.push_back(torch::ones({4}).requires_grad_());
  return made;
}

TEST(GradientReducer, SendsFullBucketsDuringTheBackward) {
  tests::run_ranks(2, [](Transport& replicas) {
    auto parameters = leaves(3);
    std::vector<int> left;
    ReducerOptions options = small_buckets(true);
    bool is_in_backward = false;
    options.hook = [&](const at::Tensor& gradients, int64_t index, bool is_last) {
      EXPECT_EQ(is_last, index == 2);
      left.push_back(is_in_backward ? static_cast<int>(index) : -1);
      return gradients;
    };
    GradientReducer reducer(parameters, replicas, options);
    reducer.begin(replicas.size());
    reducer.expect({0, 1, 2});
    is_in_backward = true;
    at::Tensor value = torch::ones({4});
    for (const at::Tensor& parameter : parameters) value = value * parameter;
    value.sum().backward();
    is_in_backward = false;
    EXPECT_EQ(left, (std::vector<int>{0, 1, 2}));
    reducer.finish();
  });
}

TEST(GradientReducer, CountsMissingGradientsAsZerosAndKeepsThoseThatNobodyHas) {
  for (const bool overlap : {true, false}) {
    tests::run_ranks(3, [&](Transport& replicas) {
      auto parameters = leaves(3);
      GradientReducer reducer(parameters, replicas, small_buckets(overlap));
      for (int step = 0; step < 2; ++step) {
        for (at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
        reducer.begin(replicas.size());
        parameters[0].mutable_grad() = torch::full({4}, 1.0 + replicas.rank());
        if (replicas.rank() == 1) parameters[2].mutable_grad() = torch::full({4}, 6.0);
        if (overlap) reducer.add_ready({2});
        reducer.finish();
        support::expect_bit_equal(parameters[0].grad(), torch::full({4}, 2.0), "of all");
        EXPECT_FALSE(parameters[1].grad().defined());
        support::expect_bit_equal(parameters[2].grad(), torch::full({4}, 2.0), "of one");
      }
    });
  }
}

// Three parts of 35 elements: each lies across two tensors.
TEST(GradientReducer, AveragesTheSameInSharedMemoryAndByMessages) {
  for (const bool shares_memory : {true, false}) {
    tests::run_ranks(3, [&](Transport& replicas) {
      std::vector<at::Tensor> parameters{torch::ones({7, 3}).requires_grad_(), torch::ones({2, 7}).t().requires_grad_()};
      GradientReducer reducer(parameters, replicas, {.shares_memory = shares_memory, .overlap = false});
      EXPECT_EQ(reducer.shared_bytes(), shares_memory ? 4 * (35 + 2) : 0);
      for (int step = 0; step < 3; ++step) {
        std::vector<at::Tensor> sums;
        for (const at::Tensor& parameter : parameters)
          sums.push_back(torch::zeros_like(parameter, parameter.options().requires_grad(false)));
        for (int rank = 0; rank < 3; ++rank) {
          for (size_t i = 0; i < parameters.size(); ++i) {
            const at::Tensor numbers = (torch::arange(sums[i].numel()) * 0.37 + step + 5 * rank).sin();
            const at::Tensor gradient = torch::empty_like(sums[i]).copy_(numbers.view(sums[i].sizes()));
            sums[i].add_(gradient);
            if (rank == replicas.rank()) parameters[i].mutable_grad() = gradient;
          }
        }
        // One that somebody else has as well is left as it is.
        const at::Tensor kept = parameters[0].grad(), copy = kept.clone();
        reducer.begin(replicas.size());
        reducer.finish();
        for (size_t i = 0; i < parameters.size(); ++i) {
          support::expect_bit_equal(parameters[i].grad(), sums[i].div(3), "parameter " + std::to_string(i));
          EXPECT_EQ(parameters[i].grad().strides(), parameters[i].strides());
        }
        support::expect_bit_equal(kept, copy, "kept");
      }
    });
  }
}

TEST(GradientReducer, RefusesReplicasWithOtherParameters) {
  tests::run_ranks(2, [](Transport& replicas) {
    auto parameters = leaves(2 + replicas.rank());
    EXPECT_TRUE(support::contains(
        support::message_of<c10::ValueError>([&] { GradientReducer reducer(parameters, replicas, small_buckets(true)); }),
        "got others on replica 1"));
  });
}

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
