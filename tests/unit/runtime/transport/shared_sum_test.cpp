// Sums in memory that ranks share, on every transport.
#include "runtime/transport/shared_sum.h"

#include <c10/util/BFloat16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/unit/runtime/transport/transport_contract.h"

namespace smp::runtime {
namespace {

class SharedSums : public TransportContract {};
SMP_FOR_EVERY_TRANSPORT(SharedSums);

constexpr int kTag = 5;
constexpr int64_t kMostElements = 100000;

// Values of which every order of addition gives other bits.
float term(int rank, int64_t i, int round) {
  return std::ldexp(1.0F + static_cast<float>((i * 37 + rank * 101 + round) % 997) / 997.0F,
                    static_cast<int>(i + rank) % 23);
}

template <class T>
void expect_sum(Transport& group, SharedSum& sum, int64_t num_elements, c10::ScalarType type, int round, bool waits) {
  sum.wait_until_free("shared sum");
  std::vector<T> own, expected;
  for (int64_t i = 0; i < num_elements; ++i) {
    float total = 0;
    for (int rank = 0; rank < group.size(); ++rank) {
      const T each = static_cast<T>(term(rank, i, round));
      total = rank == 0 ? static_cast<float>(each) : total + static_cast<float>(each);
    }
    own.push_back(static_cast<T>(term(group.rank(), i, round)));
    expected.push_back(static_cast<T>(total));
  }
  std::memcpy(sum.own(), own.data(), own.size() * sizeof(T));
  sum.start(num_elements, type);
  if (waits) sum.wait("shared sum");
  while (!sum.advance()) {
  }
  std::vector<T> got(static_cast<size_t>(num_elements));
  const int64_t head = num_elements / 3;  // in two pieces, neither of them a part of one rank
  sum.read(0, {got.data(), head * static_cast<int64_t>(sizeof(T))});
  sum.read(head * static_cast<int64_t>(sizeof(T)),
           {got.data() + head, (num_elements - head) * static_cast<int64_t>(sizeof(T))});
  sum.release();
  EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(T)), 0)
      << num_elements << " " << type << " " << round;
}

// Blocks are used again at once: a rank that is ahead must not write over what another still reads.
TEST_P(SharedSums, AddInTheOrderOfTheRanksAgainAndAgain) {
  run([](Transport& group) {
    SharedSum sum(group, kTag, SharedMemory::make(group, kMostElements * 4));
    int round = 0;
    for (const int64_t num_elements : {int64_t{1}, int64_t{3}, int64_t{1000}, int64_t{1025}, kMostElements}) {
      for (int k = 0; k < 5; ++k) {
        expect_sum<float>(group, sum, num_elements, c10::ScalarType::Float, ++round, k % 2 == 0);
        expect_sum<c10::BFloat16>(group, sum, num_elements, c10::ScalarType::BFloat16, ++round, k % 2 == 1);
      }
    }
  });
}

TEST_P(SharedSums, TellOnceWhichPartIsSummedHere) {
  run([](Transport& group) {
    SharedSum sum(group, kTag, SharedMemory::make(group, 4 * 11));
    auto* own = reinterpret_cast<float*>(sum.own());
    for (int i = 0; i < 11; ++i) own[i] = 1;
    int num_calls = 0;
    sum.start(11, c10::ScalarType::Float, [&](int64_t first, int64_t count) {
      ++num_calls;
      for (int64_t i = first; i < first + count; ++i) own[i] *= 0.5F;
    });
    sum.wait("shared sum");
    std::vector<float> got(11);
    sum.read(0, {got.data(), 44});
    sum.release();
    EXPECT_EQ(num_calls, 1);
    EXPECT_EQ(got, std::vector<float>(11, 0.5F * static_cast<float>(group.size())));
    sum.wait_until_free("shared sum");
  });
}

TEST_P(SharedSums, AreNotFreeBeforeEverybodyHasRead) {
  run([](Transport& group) {
    if (group.size() == 1) return;
    constexpr int kReadTag = kTag + 1;
    SharedSum sum(group, kTag, SharedMemory::make(group, 4));
    *reinterpret_cast<float*>(sum.own()) = 1;
    sum.start(1, c10::ScalarType::Float);
    sum.wait("shared sum");
    if (group.rank() == 0) {
      sum.release();
      EXPECT_FALSE(sum.is_free());
      for (int other = 1; other < group.size(); ++other) send(group, other, kReadTag, 1).wait("told");
    } else {
      receive<int>(group, 0, kReadTag);
      sum.release();
    }
    sum.wait_until_free("shared sum");
    EXPECT_TRUE(sum.is_free());
  });
}

TEST_P(SharedSums, FindNoMemoryOnAnyRankWhereOneHasNoRoom) {
  run([](Transport& group) {
    constexpr int64_t kTooMuch = int64_t{1} << 50;
    const bool is_last = group.rank() == group.size() - 1;
    EXPECT_EQ(SharedMemory::make(group, is_last ? kTooMuch : 64), nullptr);
    EXPECT_NE(SharedMemory::make(group, 64), nullptr);
  });
}

}  // namespace
}  // namespace smp::runtime
