// Owns the contract of messages between two ranks.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/unit/runtime/transport/transport_contract.h"

namespace smp::runtime {
namespace {

class TransportMessages : public TransportContract {};
SMP_FOR_EVERY_TRANSPORT(TransportMessages);

TEST_P(TransportMessages, NumbersTheRanks) {
  run([](Transport& transport) {
    EXPECT_GE(transport.rank(), 0);
    EXPECT_LT(transport.rank(), transport.size());
    const auto all = transport.all_gather(std::to_string(transport.rank()));
    for (int rank = 0; rank < transport.size(); ++rank) EXPECT_EQ(all[static_cast<size_t>(rank)], std::to_string(rank));
  });
}

TEST_P(TransportMessages, KeepsTheOrderOfMessagesWithOneTag) {
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

TEST_P(TransportMessages, MatchesByTagNotByArrival) {
  run([](Transport& transport) {
    constexpr int kNumTags = 50;
    std::vector<int> values(kNumTags);
    std::iota(values.begin(), values.end(), 0);
    std::vector<Request> sent;
    for (const int& value : values) sent.push_back(send(transport, next(transport), value, value));
    for (int tag = kNumTags - 1; tag >= 0; --tag) ASSERT_EQ(receive<int>(transport, previous(transport), tag), tag);
    for (Request& request : sent) request.wait();
  });
}

TEST_P(TransportMessages, TakesTheLargestTag) {
  run([](Transport& transport) {
    const int value = 5;
    Request sent = send(transport, next(transport), kMaxTag, value);
    EXPECT_EQ(receive<int>(transport, previous(transport), kMaxTag), 5);
    sent.wait();
  });
}

TEST_P(TransportMessages, ReceivesInAReceivePostedBeforeTheSend) {
  run([](Transport& transport) {
    std::vector<int> got(4, -1);
    std::vector<Request> received;
    for (int& value : got) received.push_back(transport.irecv(previous(transport), 1, &value, sizeof(value)));
    transport.barrier();
    const std::vector<int> values{10, 11, 12, 13};
    std::vector<Request> sent;
    for (const int& value : values) sent.push_back(send(transport, next(transport), 1, value));
    for (Request& request : received) EXPECT_EQ(request.wait("1F0"), 4);
    for (Request& request : sent) request.wait("1F0");
    EXPECT_EQ(got, values);
  });
}

TEST_P(TransportMessages, ReceivesAMessageThatCameBeforeTheReceive) {
  run([](Transport& transport) {
    const int value = 42;
    Request sent = send(transport, next(transport), 1, value);
    transport.barrier();
    EXPECT_EQ(receive<int>(transport, previous(transport), 1), 42);
    sent.wait();
  });
}

TEST_P(TransportMessages, SendsZeroBytes) {
  run([](Transport& transport) {
    Request sent = transport.isend(next(transport), 0, nullptr, 0);
    EXPECT_EQ(transport.irecv(previous(transport), 0, nullptr, 0).wait(), 0);
    EXPECT_EQ(sent.wait(), 0);
  });
}

TEST_P(TransportMessages, ReportsTheLengthOfAShorterMessage) {
  run([](Transport& transport) {
    const char text[] = "abc";
    char got[16] = {};
    Request sent = transport.isend(next(transport), 0, text, 3);
    EXPECT_EQ(transport.irecv(previous(transport), 0, got, sizeof(got)).wait(), 3);
    EXPECT_STREQ(got, "abc");
    sent.wait();
  });
}

TEST_P(TransportMessages, SendsToItself) {
  run([](Transport& transport) {
    const int value = transport.rank();
    Request sent = send(transport, transport.rank(), 9, value);
    EXPECT_EQ(receive<int>(transport, transport.rank(), 9), value);
    sent.wait();
  });
}

TEST_P(TransportMessages, Sends64MegabytesEachWay) {
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

TEST_P(TransportMessages, TestSaysTrueOnceAndForAll) {
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

TEST_P(TransportMessages, FinishesDroppedSends) {
  run([](Transport& transport) {
    std::vector<int> values(300);
    std::iota(values.begin(), values.end(), 0);
    for (const int& value : values) Request dropped = send(transport, next(transport), 4, value);
    for (const int& value : values) ASSERT_EQ(receive<int>(transport, previous(transport), 4), value);
    transport.barrier();
    transport.progress();
  });
}

TEST_P(TransportMessages, FinishesASendWhoseReceiverHasAskedForItAndWaitsForSomethingElse) {
  run([](Transport& transport) {
    Request received, sent;
    int64_t got = 0;
    const int64_t mine = transport.rank();
    if (transport.rank() == 0) received = transport.irecv(transport.size() - 1, 7, &got, sizeof got);
    transport.barrier();
    if (transport.rank() == transport.size() - 1) {
      sent = send(transport, 0, 7, mine);
      if (transport.rank() != 0) sent.wait("send");
    }
    transport.barrier();
    received.wait("receive");
    sent.wait("send");
    EXPECT_EQ(got, transport.rank() == 0 ? transport.size() - 1 : 0);
  });
}

TEST_P(TransportMessages, SendsStringsOfUnknownLength) {
  run([](Transport& transport) {
    const std::string text(static_cast<size_t>(transport.rank()) * 10000, 'x');
    if (transport.rank() > 0) transport.send_bytes(0, 5, text);
    for (int source = 1; transport.rank() == 0 && source < transport.size(); ++source)
      EXPECT_EQ(transport.receive_bytes(source, 5), std::string(source * 10000UL, 'x'));
  });
}

TEST_P(TransportMessages, SendsLongStringsInParts) {
  constexpr int64_t kPartBytes = 7;
  run([](Transport& transport) {
    const std::string text = "twenty-two characters!";
    if (transport.rank() > 0) transport.send_bytes(0, 5, text, kPartBytes);
    for (int source = 1; transport.rank() == 0 && source < transport.size(); ++source)
      EXPECT_EQ(transport.receive_bytes(source, 5, kPartBytes), text);
  });
}

}  // namespace
}  // namespace smp::runtime
