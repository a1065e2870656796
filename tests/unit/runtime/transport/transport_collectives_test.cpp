// Owns the contract of collectives and groups.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "tests/unit/runtime/transport/transport_contract.h"

namespace smp::runtime {
namespace {

class TransportCollectives : public TransportContract {};
SMP_FOR_EVERY_TRANSPORT(TransportCollectives);

template <class T>
void check_sum_of(Transport& transport, int64_t num_elements, c10::ScalarType type) {
  // Rank r contributes (r + 1) * (i % 7): exact in every type, so the closed form is, too.
  const int n = transport.size();
  std::vector<T> data;
  for (int64_t i = 0; i < num_elements; ++i)
    data.push_back(static_cast<T>(static_cast<float>((transport.rank() + 1) * (i % 7))));
  transport.all_reduce_sum(data.data(), num_elements, type);
  int64_t num_wrong = 0;
  for (int64_t i = 0; i < num_elements; ++i)
    num_wrong += static_cast<double>(data[static_cast<size_t>(i)]) != static_cast<double>(n * (n + 1) / 2 * (i % 7));
  EXPECT_EQ(num_wrong, 0) << num_elements << " " << c10::toString(type);
}

TEST_P(TransportCollectives, SumsToTheClosedForm) {
  run([](Transport& transport) {
    for (const int64_t num_elements : {0, 1, 3, 1000, 100000}) {
      check_sum_of<float>(transport, num_elements, c10::ScalarType::Float);
      check_sum_of<double>(transport, num_elements, c10::ScalarType::Double);
      check_sum_of<int64_t>(transport, num_elements, c10::ScalarType::Long);
      check_sum_of<c10::BFloat16>(transport, num_elements, c10::ScalarType::BFloat16);
      check_sum_of<c10::Half>(transport, num_elements, c10::ScalarType::Half);
    }
  });
}

// Values of which every order of addition gives other bits.
float contribution(int rank, size_t i) {
  return std::ldexp(1.0F + static_cast<float>((i * 37 + static_cast<size_t>(rank) * 101) % 997) / 997.0F,
                    static_cast<int>(i + static_cast<size_t>(rank)) % 23);
}

TEST_P(TransportCollectives, AddsInTheOrderOfTheRanks) {
  run([](Transport& transport) {
    for (const size_t num_elements : {1UL, 3UL, 1000UL, 1025UL, 100000UL, 700001UL}) {
      std::vector<float> data(num_elements);
      std::vector<float> expected(num_elements);
      for (size_t i = 0; i < num_elements; ++i) {
        data[i] = contribution(transport.rank(), i);
        expected[i] = contribution(0, i);
        for (int rank = 1; rank < transport.size(); ++rank) expected[i] += contribution(rank, i);
      }
      transport.all_reduce_sum(data.data(), static_cast<int64_t>(num_elements), c10::ScalarType::Float);
      EXPECT_EQ(data == expected, true) << num_elements;
    }
  });
}

TEST_P(TransportCollectives, RoundsSixteenBitSumsOnce) {
  run([](Transport& transport) {
    // 256 + 1 + 1 + ... in bfloat16 would stay 256: one has no place behind 256.
    c10::BFloat16 value = transport.rank() == 0 ? 256.0F : 1.0F;
    transport.all_reduce_sum(&value, 1, c10::ScalarType::BFloat16);
    const c10::BFloat16 expected = 256.0F + static_cast<float>(transport.size() - 1);
    EXPECT_EQ(static_cast<float>(value), static_cast<float>(expected));
  });
}

TEST_P(TransportCollectives, BroadcastsFromEveryRoot) {
  run([](Transport& transport) {
    for (int root = 0; root < transport.size(); ++root) {
      std::vector<int> data(1000, transport.rank());
      transport.broadcast(data.data(), 4000, root);
      EXPECT_EQ(data, std::vector<int>(1000, root));
      transport.broadcast(nullptr, 0, root);
    }
  });
}

TEST_P(TransportCollectives, GathersStringsOfDifferentLengths) {
  run([](Transport& transport) {
    const auto text_of = [](int rank) { return std::string(rank * 50000UL, static_cast<char>('a' + rank)); };
    const auto all = transport.all_gather(text_of(transport.rank()));
    ASSERT_EQ(all.size(), static_cast<size_t>(transport.size()));
    for (int rank = 0; rank < transport.size(); ++rank) EXPECT_EQ(all[static_cast<size_t>(rank)], text_of(rank));
  });
}

TEST_P(TransportCollectives, NumbersTheMembersOfAGroupAnew) {
  run([](Transport& transport) {
    std::vector<int> reversed;
    for (int rank = transport.size() - 1; rank >= 0; --rank) reversed.push_back(rank);
    const auto group = transport.group(reversed);
    EXPECT_EQ(group->size(), transport.size());
    EXPECT_EQ(group->rank(), transport.size() - 1 - transport.rank());
    const auto all = group->all_gather(std::to_string(transport.rank()));
    for (int rank = 0; rank < transport.size(); ++rank)
      EXPECT_EQ(all[static_cast<size_t>(rank)], std::to_string(transport.size() - 1 - rank));
  });
}

TEST_P(TransportCollectives, KeepsGroupsApart) {
  run([](Transport& transport) {
    // Even and odd ranks; the same peers, tags and times in both and in the world.
    std::vector<int> members;
    for (int rank = transport.rank() % 2; rank < transport.size(); rank += 2) members.push_back(rank);
    const auto group = transport.group(members);
    const auto same_again = transport.group(members);
    const int in_group = 1, in_same_again = 2, in_world = 3;
    Request sent[] = {send(*group, next(*group), 0, in_group), send(*same_again, next(*group), 0, in_same_again),
                      send(transport, members[static_cast<size_t>(next(*group))], 0, in_world)};
    const int source = members[static_cast<size_t>(previous(*group))];
    EXPECT_EQ(receive<int>(transport, source, 0), in_world);
    EXPECT_EQ(receive<int>(*same_again, previous(*group), 0), in_same_again);
    EXPECT_EQ(receive<int>(*group, previous(*group), 0), in_group);
    for (Request& request : sent) request.wait();
    int64_t sum = transport.rank();
    group->all_reduce_sum(&sum, 1, c10::ScalarType::Long);
    EXPECT_EQ(sum, std::accumulate(members.begin(), members.end(), int64_t{0}));
    group->barrier();
  });
}

TEST_P(TransportCollectives, MakesAGroupWithinAGroup) {
  run([](Transport& transport) {
    if (transport.rank() == 0 && transport.size() > 1) return;
    std::vector<int> tail;
    for (int rank = transport.size() > 1 ? 1 : 0; rank < transport.size(); ++rank) tail.push_back(rank);
    const auto group = transport.group(tail);
    const auto alone = group->group({group->rank()});
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->all_gather("me").front(), "me");
    std::vector<int> all(tail.size());
    std::iota(all.begin(), all.end(), 0);
    int64_t count = 1;
    group->group(all)->all_reduce_sum(&count, 1, c10::ScalarType::Long);
    EXPECT_EQ(count, static_cast<int64_t>(tail.size()));
  });
}

}  // namespace
}  // namespace smp::runtime
