// Owns the contract of every transport, as one suite: over the loopback with 1 ... 5 ranks when
// started alone, over MPI when started by mpirun.
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <numeric>

#include "runtime/transport/error.h"
#include "runtime/transport/mpi_transport.h"
#include "tests/support/loopback_world.h"

namespace smp::runtime {
namespace {

using std::chrono::milliseconds;
using Body = std::function<void(Transport&)>;

constexpr int kUnderMpirun = 0;
constexpr auto kTestTimeout = std::chrono::seconds(60);

bool is_under_mpirun() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr; }

std::vector<int> worlds() {
  if (is_under_mpirun()) return {kUnderMpirun};
  return {1, 2, 3, 4, 5};
}

// mpirun calls a program that ends without finalising MPI a failure.
class MpiEnd : public testing::Environment {
 public:
  void TearDown() override { mpi::shutdown(*mpi::create()); }
};

[[maybe_unused]] const auto* const mpi_end =
    is_under_mpirun() ? testing::AddGlobalTestEnvironment(new MpiEnd) : nullptr;

class TransportContract : public testing::TestWithParam<int> {
 protected:
  // Every rank runs `body`, with a world of its own that no earlier test has touched.
  void run(const Body& body, milliseconds timeout = kTestTimeout) const {
    if (GetParam() == kUnderMpirun)
      body(*mpi::create({.timeout = timeout}));
    else
      tests::run_ranks(GetParam(), body, timeout);
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, TransportContract, testing::ValuesIn(worlds()),
                         [](const auto& world) {
                           return world.param == kUnderMpirun
                                      ? std::string("Mpi")
                                      : "Loopback" + std::to_string(world.param);
                         });

int next(const Transport& transport) { return (transport.rank() + 1) % transport.size(); }
int previous(const Transport& transport) {
  return (transport.rank() + transport.size() - 1) % transport.size();
}

template <class T>
Request send(Transport& transport, int dest, int tag, const T& value) {
  return transport.isend(dest, tag, &value, sizeof(value));
}
template <class T>
T receive(Transport& transport, int source, int tag) {
  T value{};
  EXPECT_EQ(transport.irecv(source, tag, &value, sizeof(value)).wait("receive"),
            static_cast<int64_t>(sizeof(value)));
  return value;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error.what();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST_P(TransportContract, NumbersTheRanks) {
  run([](Transport& transport) {
    EXPECT_GE(transport.rank(), 0);
    EXPECT_LT(transport.rank(), transport.size());
    const auto all = transport.all_gather(std::to_string(transport.rank()));
    for (int rank = 0; rank < transport.size(); ++rank)
      EXPECT_EQ(all[static_cast<size_t>(rank)], std::to_string(rank));
  });
}

TEST_P(TransportContract, KeepsTheOrderOfMessagesWithOneTag) {
  run([](Transport& transport) {
    constexpr int kNumMessages = 100;
    std::vector<int> values(kNumMessages);
    std::iota(values.begin(), values.end(), transport.rank() * 1000);
    std::vector<Request> sent;
    for (const int& value : values) sent.push_back(send(transport, next(transport), 3, value));
    for (int i = 0; i < kNumMessages; ++i)
      ASSERT_EQ(receive<int>(transport, previous(transport), 3), previous(transport) * 1000 + i);
    for (Request& request : sent) EXPECT_EQ(request.wait(), 4);
  });
}

TEST_P(TransportContract, MatchesByTagNotByArrival) {
  run([](Transport& transport) {
    constexpr int kNumTags = 50;
    std::vector<int> values(kNumTags);
    std::iota(values.begin(), values.end(), 0);
    std::vector<Request> sent;
    for (const int& value : values) sent.push_back(send(transport, next(transport), value, value));
    for (int tag = kNumTags - 1; tag >= 0; --tag)
      ASSERT_EQ(receive<int>(transport, previous(transport), tag), tag);
    for (Request& request : sent) request.wait();
  });
}

TEST_P(TransportContract, TakesTheLargestTag) {
  run([](Transport& transport) {
    const int value = 5;
    Request sent = send(transport, next(transport), kMaxTag, value);
    EXPECT_EQ(receive<int>(transport, previous(transport), kMaxTag), 5);
    sent.wait();
  });
}

TEST_P(TransportContract, ReceivesInAReceivePostedBeforeTheSend) {
  run([](Transport& transport) {
    std::vector<int> got(4, -1);
    std::vector<Request> received;
    for (int& value : got)
      received.push_back(transport.irecv(previous(transport), 1, &value, sizeof(value)));
    transport.barrier();
    const std::vector<int> values{10, 11, 12, 13};
    std::vector<Request> sent;
    for (const int& value : values) sent.push_back(send(transport, next(transport), 1, value));
    for (Request& request : received) EXPECT_EQ(request.wait("1F0"), 4);
    for (Request& request : sent) request.wait("1F0");
    EXPECT_EQ(got, values);
  });
}

TEST_P(TransportContract, ReceivesAMessageThatCameBeforeTheReceive) {
  run([](Transport& transport) {
    const int value = 42;
    Request sent = send(transport, next(transport), 1, value);
    transport.barrier();
    EXPECT_EQ(receive<int>(transport, previous(transport), 1), 42);
    sent.wait();
  });
}

TEST_P(TransportContract, SendsZeroBytes) {
  run([](Transport& transport) {
    Request sent = transport.isend(next(transport), 0, nullptr, 0);
    EXPECT_EQ(transport.irecv(previous(transport), 0, nullptr, 0).wait(), 0);
    EXPECT_EQ(sent.wait(), 0);
  });
}

TEST_P(TransportContract, ReportsTheLengthOfAShorterMessage) {
  run([](Transport& transport) {
    const char text[] = "abc";
    char got[16] = {};
    Request sent = transport.isend(next(transport), 0, text, 3);
    EXPECT_EQ(transport.irecv(previous(transport), 0, got, sizeof(got)).wait(), 3);
    EXPECT_STREQ(got, "abc");
    sent.wait();
  });
}

TEST_P(TransportContract, SendsToItself) {
  run([](Transport& transport) {
    const int value = transport.rank();
    Request sent = send(transport, transport.rank(), 9, value);
    EXPECT_EQ(receive<int>(transport, transport.rank(), 9), value);
    sent.wait();
  });
}

TEST_P(TransportContract, Sends64MegabytesEachWay) {
  run([](Transport& transport) {
    constexpr size_t kNumElements = (64 << 20) / sizeof(uint32_t);
    std::vector<uint32_t> data(kNumElements);
    std::iota(data.begin(), data.end(), static_cast<uint32_t>(transport.rank()));
    std::vector<uint32_t> got(kNumElements);
    const auto num_bytes = static_cast<int64_t>(kNumElements * sizeof(uint32_t));
    Request received = transport.irecv(previous(transport), 2, got.data(), num_bytes);
    Request sent = transport.isend(next(transport), 2, data.data(), num_bytes);
    EXPECT_EQ(received.wait(), num_bytes);
    sent.wait();
    bool is_equal = true;
    for (size_t i = 0; i < kNumElements; ++i)
      is_equal = is_equal && got[i] == static_cast<uint32_t>(previous(transport)) + i;
    EXPECT_TRUE(is_equal);
  });
}

TEST_P(TransportContract, TestSaysTrueOnceAndForAll) {
  run([](Transport& transport) {
    int got = 0;
    const int value = 7;
    Request received = transport.irecv(previous(transport), 1, &got, sizeof(got));
    EXPECT_FALSE(received.test());
    transport.barrier();
    Request sent = send(transport, next(transport), 1, value);
    while (!received.test()) transport.progress();
    EXPECT_TRUE(received.test());
    EXPECT_EQ(received.wait(), 4);
    EXPECT_EQ(got, 7);
    sent.wait();
    EXPECT_TRUE(sent.test());
  });
}

TEST_P(TransportContract, FinishesDroppedSends) {
  run([](Transport& transport) {
    std::vector<int> values(300);
    std::iota(values.begin(), values.end(), 0);
    for (const int& value : values) Request dropped = send(transport, next(transport), 4, value);
    for (const int& value : values)
      ASSERT_EQ(receive<int>(transport, previous(transport), 4), value);
    transport.barrier();
    transport.progress();
  });
}

TEST_P(TransportContract, SendsStringsOfUnknownLength) {
  run([](Transport& transport) {
    const std::string text(static_cast<size_t>(transport.rank()) * 10000, 'x');
    if (transport.rank() > 0) transport.send_bytes(0, 5, text);
    for (int source = 1; transport.rank() == 0 && source < transport.size(); ++source)
      EXPECT_EQ(transport.receive_bytes(source, 5), std::string(source * 10000UL, 'x'));
  });
}

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
    num_wrong += static_cast<double>(data[static_cast<size_t>(i)]) !=
                 static_cast<double>(n * (n + 1) / 2 * (i % 7));
  EXPECT_EQ(num_wrong, 0) << num_elements << " " << c10::toString(type);
}

TEST_P(TransportContract, SumsToTheClosedForm) {
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
  return std::ldexp(
      1.0F + static_cast<float>((i * 37 + static_cast<size_t>(rank) * 101) % 997) / 997.0F,
      static_cast<int>(i + static_cast<size_t>(rank)) % 23);
}

TEST_P(TransportContract, AddsInTheOrderOfTheRanks) {
  run([](Transport& transport) {
    for (const size_t num_elements : {1UL, 3UL, 1000UL, 1025UL, 100000UL, 700001UL}) {
      std::vector<float> data(num_elements);
      std::vector<float> expected(num_elements);
      for (size_t i = 0; i < num_elements; ++i) {
        data[i] = contribution(transport.rank(), i);
        expected[i] = contribution(0, i);
        for (int rank = 1; rank < transport.size(); ++rank) expected[i] += contribution(rank, i);
      }
      transport.all_reduce_sum(data.data(), static_cast<int64_t>(num_elements),
                               c10::ScalarType::Float);
      EXPECT_EQ(data == expected, true) << num_elements;
    }
  });
}

TEST_P(TransportContract, RoundsSixteenBitSumsOnce) {
  run([](Transport& transport) {
    // 256 + 1 + 1 + ... in bfloat16 would stay 256: one has no place behind 256.
    c10::BFloat16 value = transport.rank() == 0 ? 256.0F : 1.0F;
    transport.all_reduce_sum(&value, 1, c10::ScalarType::BFloat16);
    const c10::BFloat16 expected = 256.0F + static_cast<float>(transport.size() - 1);
    EXPECT_EQ(static_cast<float>(value), static_cast<float>(expected));
  });
}

TEST_P(TransportContract, BroadcastsFromEveryRoot) {
  run([](Transport& transport) {
    for (int root = 0; root < transport.size(); ++root) {
      std::vector<int> data(1000, transport.rank());
      transport.broadcast(data.data(), 4000, root);
      EXPECT_EQ(data, std::vector<int>(1000, root));
      transport.broadcast(nullptr, 0, root);
    }
  });
}

TEST_P(TransportContract, GathersStringsOfDifferentLengths) {
  run([](Transport& transport) {
    const auto text_of = [](int rank) {
      return std::string(rank * 50000UL, static_cast<char>('a' + rank));
    };
    const auto all = transport.all_gather(text_of(transport.rank()));
    ASSERT_EQ(all.size(), static_cast<size_t>(transport.size()));
    for (int rank = 0; rank < transport.size(); ++rank)
      EXPECT_EQ(all[static_cast<size_t>(rank)], text_of(rank));
  });
}

TEST_P(TransportContract, NumbersTheMembersOfAGroupAnew) {
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

TEST_P(TransportContract, KeepsGroupsApart) {
  run([](Transport& transport) {
    // Even and odd ranks; the same peers, tags and times in both and in the world.
    std::vector<int> members;
    for (int rank = transport.rank() % 2; rank < transport.size(); rank += 2)
      members.push_back(rank);
    const auto group = transport.group(members);
    const auto same_again = transport.group(members);
    const int in_group = 1, in_same_again = 2, in_world = 3;
    Request sent[] = {send(*group, next(*group), 0, in_group),
                      send(*same_again, next(*group), 0, in_same_again),
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

TEST_P(TransportContract, MakesAGroupWithinAGroup) {
  run([](Transport& transport) {
    if (transport.rank() == 0 && transport.size() > 1) return;
    std::vector<int> tail;
    for (int rank = transport.size() > 1 ? 1 : 0; rank < transport.size(); ++rank)
      tail.push_back(rank);
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

TEST_P(TransportContract, RefusesCallersMistakesBeforeAnythingIsSent) {
  run([](Transport& transport) {
    const int n = transport.size();
    int value = 0;
    const auto refused = [](const auto& call) { EXPECT_THROW(call(), c10::ValueError); };
    refused([&] { (void)transport.isend(n, 0, &value, 4); });
    refused([&] { (void)transport.isend(0, -1, &value, 4); });
    refused([&] { (void)transport.irecv(-1, 0, &value, 4); });
    refused([&] { (void)transport.irecv(0, kMaxTag + 1, &value, 4); });
    refused([&] { (void)transport.irecv(0, 0, &value, -4); });
    refused([&] { transport.broadcast(&value, 4, n); });
    refused([&] { transport.group({transport.rank(), transport.rank()}); });
    refused([&] { transport.group({transport.rank(), n}); });
    refused([&] { transport.group({}); });
    EXPECT_THROW(transport.all_reduce_sum(&value, 1, c10::ScalarType::Int), c10::TypeError);
    expect_contains(error_of([&] { (void)transport.isend(n, 0, &value, 4); }),
                    "isend: expected a peer of 0 ... " + std::to_string(n - 1) + ", got rank " +
                        std::to_string(n));
    transport.barrier();
  });
}

TEST_P(TransportContract, ReportsATruncatedMessage) {
  run([](Transport& transport) {
    const int64_t values[2] = {1, 2};
    int64_t got = 0;
    Request sent = transport.isend(transport.rank(), 8, values, sizeof(values));
    Request received = transport.irecv(transport.rank(), 8, &got, sizeof(got));
    const std::string text = error_of([&] { received.wait("2F0"); });
    expect_contains(text, "receive of at most 8 bytes with tag 8");
    expect_contains(text, "peer rank " + std::to_string(transport.rank()));
    expect_contains(text, "action 2F0");
    expect_contains(text, "truncated: expected at most 8 bytes, got 16");
    transport.barrier();
  });
}

// Rank 0 fails as `fail` says; the others compute and drive their messages until they hear of it.
void fail_on_rank_0(Transport& transport, const Body& fail) {
  if (transport.rank() == 0) return fail(transport);
  EXPECT_THROW(for (;;) transport.progress(), CommError);
}

TEST_P(TransportContract, NamesWhatTimedOut) {
  const auto body = [](Transport& transport) {
    if (transport.size() == 1) return;
    fail_on_rank_0(transport, [](Transport& mine) {
      int64_t value = 0;
      Request received = mine.irecv(1, 6, &value, sizeof(value));
      const std::string text = error_of([&] { received.wait("2F0", milliseconds(150)); });
      expect_contains(text,
                      "receive of at most 8 bytes with tag 6, peer rank 1, action 2F0, after 0.");
      expect_contains(text, "timed out");
      EXPECT_THROW(mine.progress(), CommError);
      mine.abort("timed out");
    });
  };
  run(body);
}

TEST_P(TransportContract, TimesOutInACollective) {
  run([](Transport& transport) {
    if (transport.size() == 1) return;
    fail_on_rank_0(transport, [](Transport& mine) {
      mine.set_timeout(milliseconds(150));
      EXPECT_EQ(mine.timeout(), milliseconds(150));
      const std::string text = error_of([&] { mine.barrier(); });
      expect_contains(text, "barrier, after 0.");
      mine.abort("timed out");
    });
  });
}

TEST_P(TransportContract, TellsAllRanksThatOneHasAborted) {
  run([](Transport& transport) {
    if (transport.rank() == transport.size() - 1) {
      transport.abort("the disk is full");
      return;
    }
    int value = 0;
    try {
      transport.irecv(transport.size() - 1, 0, &value, sizeof(value)).wait();
      ADD_FAILURE() << "expected AbortedError";
    } catch (const AbortedError& error) {
      EXPECT_EQ(error.failed_rank(), transport.size() - 1);
      EXPECT_STREQ(
          error.what(),
          ("rank " + std::to_string(transport.size() - 1) + " failed: the disk is full").c_str());
    }
    EXPECT_THROW(transport.barrier(), AbortedError);
    EXPECT_THROW((void)transport.isend(0, 0, &value, 4), AbortedError);
  });
}

}  // namespace
}  // namespace smp::runtime
