// Owns what only sockets can get wrong: strangers, connections that end, messages that are broken off.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/json/parse.hpp>
#include <future>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "runtime/transport/error.h"
#include "runtime/transport/socket_transport.h"

namespace smp::runtime::sockets {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kTimeout = std::chrono::seconds(60);

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

using Body = std::function<void(Transport&)>;

// Rank 1 of two, on a thread of its own. It ends without a word unless `body` shuts it down.
std::future<void> second_rank(c10d::HashStore& store, const std::string& host, const Body& body) {
  return std::async(std::launch::async, [&store, host, body] { body(*create(store, {1, 2, 2, host}, kTimeout)); });
}

TEST(Sockets, NameTheRankThatDoesNotCome) {
  c10d::HashStore store;
  const std::string text = error_of([&] { create(store, {0, 2, 2}, milliseconds(200)); });
  EXPECT_NE(text.find("meeting of 2 ranks, peer rank 1"), std::string::npos) << text;
  EXPECT_NE(text.find("got none of rank 1"), std::string::npos) << text;
}

TEST(Sockets, CloseConnectionsOfStrangers) {
  c10d::HashStore store;
  auto first = std::async(std::launch::async, [&] { shutdown(*create(store, {0, 2, 2, "127.0.0.1"}, kTimeout)); });
  const std::vector<uint8_t> text = store.get("address/0");  // waits for it
  const auto port = boost::json::parse(std::string(text.begin(), text.end())).at("port").to_number<uint16_t>();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const Descriptor stranger(socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(connect(stranger.number(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  std::string hello(40, '\0');  // of rank 1, without the secret
  hello[32] = 1;
  ASSERT_EQ(write(stranger.number(), hello.data(), hello.size()), 40);
  auto second = second_rank(store, "127.0.0.1", shutdown);
  char nothing = 0;
  EXPECT_LE(read(stranger.number(), &nothing, 1), 0) << "it is closed";
  first.get();
  second.get();
}

TEST(Sockets, NameARankWhoseConnectionsEnd) {
  for (const std::string host : {"", "127.0.0.1"}) {
    c10d::HashStore store;
    auto second = second_rank(store, host, [](Transport&) {});
    const auto first = create(store, {0, 2, 2, host}, kTimeout);
    int value = 0;
    const std::string text = error_of([&] { first->irecv(1, 0, &value, sizeof value).wait(); });
    EXPECT_EQ(text.rfind("rank 1 (pid ", 0), 0) << text;
    EXPECT_THROW(first->barrier(), PeerLostError);
  }
}

TEST(Sockets, HearOfAFailureBehindAMessageThatIsBrokenOff) {
  c10d::HashStore store;
  const std::vector<char> large(64 << 20);
  auto second = second_rank(store, "", [&](Transport& transport) {
    const Request sent = transport.isend(0, 0, large.data(), static_cast<int64_t>(large.size()));
    transport.abort("the disk is full");
  });
  const auto first = create(store, {0, 2, 2}, kTimeout);
  std::vector<char> into(large.size());
  EXPECT_EQ(error_of([&] { first->irecv(1, 0, into.data(), static_cast<int64_t>(into.size())).wait(); }),
            "rank 1 failed: the disk is full");
}

TEST(Sockets, KeepMessagesForWhoAsksLater) {
  c10d::HashStore store;
  const std::vector<int> values{3, 1, 2};
  auto second = second_rank(store, "", [&](Transport& transport) {
    for (const int value : values) transport.isend(0, value, &value, sizeof value).wait();
    shutdown(transport);
  });
  const auto first = create(store, {0, 2, 2}, kTimeout);
  for (int tag = 1; tag <= 3; ++tag) {
    int got = 0;
    first->irecv(1, tag, &got, sizeof got).wait();
    EXPECT_EQ(got, tag);
  }
  shutdown(*first);
}

}  // namespace
}  // namespace smp::runtime::sockets
