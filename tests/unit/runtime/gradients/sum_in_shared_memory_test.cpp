// Sums of buckets in memory that ranks share, on every transport.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "runtime/gradients/bucket_sum.h"
#include "runtime/transport/shared_memory.h"
#include "tests/unit/runtime/transport/transport_contract.h"

namespace smp::runtime {
namespace {

class SharedSums : public TransportContract {};
SMP_FOR_EVERY_TRANSPORT(SharedSums);

constexpr int kTag = 5;
constexpr int64_t kMostElements = 100000;

// Values of which every order of addition gives other bits.
at::Tensor terms(int rank, int64_t num_elements, int round) {
  std::vector<float> all;
  for (int64_t i = 0; i < num_elements; ++i) {
    all.push_back(std::ldexp(1.0F + static_cast<float>((i * 37 + rank * 101 + round) % 997) / 997.0F,
                             static_cast<int>(i + rank) % 23));
  }
  return torch::tensor(all);
}

/// Of two parameters, neither of them a part of one rank.
struct TwoParameters {
  explicit TwoParameters(const at::Tensor& gradient) {
    const int64_t head = gradient.numel() / 3;
    for (const at::Tensor& own : {gradient.narrow(0, 0, head), gradient.narrow(0, head, gradient.numel() - head)}) {
      parameters.push_back(at::zeros_like(own));
      parameters.back().mutable_grad() = own.clone();
      bucket.add(0, parameters.back());
    }
  }
  at::Tensor gradient() const { return at::cat({parameters[0].grad(), parameters[1].grad()}); }

  std::vector<at::Tensor> parameters;
  BucketMemory bucket{nullptr, nullptr};
};

void expect_means(Transport& group, BucketSum& sum, int64_t num_elements, c10::ScalarType type, int round, bool waits) {
  at::Tensor expected = terms(0, num_elements, round).to(type).to(at::kFloat);
  for (int rank = 1; rank < group.size(); ++rank) expected.add_(terms(rank, num_elements, round).to(type));
  TwoParameters own(terms(group.rank(), num_elements, round).to(type));
  sum.wait();
  sum.start(own.bucket, /*divisor=*/3);
  if (waits) sum.wait();
  while (!sum.advance()) {
  }
  sum.finish(own.bucket, Backward::kIsOver);
  EXPECT_TRUE(own.gradient().equal(expected.to(type).div_(3))) << num_elements << " " << type << " " << round;
}

// Blocks are used again at once: a rank that is ahead must not write over what another still reads.
TEST_P(SharedSums, AddInTheOrderOfTheRanksAgainAndAgain) {
  run([](Transport& group) {
    const auto sum = sum_in_shared_memory(group, kTag, (kMostElements + 2) * 4);
    int round = 0;
    for (const int64_t num_elements : {int64_t{1}, int64_t{3}, int64_t{1000}, int64_t{1025}, kMostElements}) {
      for (int k = 0; k < 5; ++k) {
        expect_means(group, *sum, num_elements, c10::ScalarType::Float, ++round, k % 2 == 0);
        expect_means(group, *sum, num_elements, c10::ScalarType::BFloat16, ++round, k % 2 == 1);
      }
    }
    sum->wait();
  });
}

TEST_P(SharedSums, AreNotFreeBeforeEverybodyHasRead) {
  run([](Transport& group) {
    if (group.size() == 1) return;
    constexpr int kReadTag = kTag + 1;
    TwoParameters own(at::ones({3}));
    const auto sum = sum_in_shared_memory(group, kTag, own.bucket.num_bytes());
    sum->start(own.bucket, 1);
    sum->wait();
    if (group.rank() == 0) {
      sum->finish(own.bucket, Backward::kIsOver);
      EXPECT_FALSE(sum->is_free());
      for (int other = 1; other < group.size(); ++other) send(group, other, kReadTag, 1).wait("told");
    } else {
      receive<int>(group, 0, kReadTag);
      sum->finish(own.bucket, Backward::kIsOver);
    }
    sum->wait();
    EXPECT_TRUE(sum->is_free());
  });
}

TEST_P(SharedSums, FindNoMemoryOnAnyRankWhereOneHasNoRoom) {
  run([](Transport& group) {
    constexpr int64_t kTooMuch = int64_t{1} << 50;
    const bool is_last = group.rank() == group.size() - 1;
    EXPECT_EQ(sum_in_shared_memory(group, kTag, is_last ? kTooMuch : 64), nullptr);
    EXPECT_NE(SharedMemory::make(group, 64), nullptr);
  });
}

}  // namespace
}  // namespace smp::runtime
