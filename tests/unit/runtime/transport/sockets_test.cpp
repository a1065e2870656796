// Owns what only sockets can get wrong: strangers, connections that end, messages that are broken off.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <boost/json/parse.hpp>
#include <future>
#include <memory>
#include <string>
#include <thread>
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

sockaddr_in local_address(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

using Body = std::function<void(Transport&)>;

// Rank 1 of two, on a thread of its own. It ends without a word unless `body` shuts it down.
std::future<void> second_rank(c10d::HashStore& store, const std::string& host, const Body& body) {
  return std::async(std::launch::async, [&store, host, body] { body(*create(store, {1, 2, 2, host}, kTimeout)); });
}

TEST(Sockets, NameTheRankThatDoesNotCome) {
  c10d::HashStore store;
  const std::string text = error_of([&] { create(store, {0, 2, 2}, milliseconds(200)); });
  EXPECT_NE(text.find("meeting of 2 ranks"), std::string::npos) << text;
  EXPECT_NE(text.find("got none of rank 1"), std::string::npos) << text;
}

// Of who kept the store of an attempt that has failed, or whose port is another's by now.
TEST(Sockets, LookAgainForARankWhoseAddressIsOfAProcessThatIsGone) {
  sockaddr_in address = local_address(0);
  const Descriptor gone(socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(bind(gone.number(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(gone.number(), 8), 0);
  socklen_t size = sizeof address;
  ASSERT_EQ(getsockname(gone.number(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string text =
      R"({"host":"127.0.0.1","name":"smp-00112233445566778899aabbccddeeff","secret":"00112233445566778899aabbccddeeff",)"
      R"("identity":"gone\nnowhere\n1\n1","port":)" +
      std::to_string(ntohs(address.sin_port)) + "}";
  c10d::HashStore store;
  store.set("address/0", std::vector<uint8_t>(text.begin(), text.end()));
  auto second = second_rank(store, "127.0.0.1", shutdown);
  {
    const Descriptor came(accept(gone.number(), nullptr, nullptr));
  }
  shutdown(*create(store, {0, 2, 2, "127.0.0.1"}, kTimeout));
  second.get();
}

TEST(Sockets, EndAMeetingInTimeThoughSignalsCome) {
  const auto before = signal(SIGUSR1, [](int) {});
  std::atomic<bool> is_over = false;
  std::string text;
  c10d::HashStore store;
  std::thread rank([&] {
    text = error_of([&] { create(store, {0, 2, 2}, milliseconds(200)); });
    is_over = true;
  });
  while (!is_over) pthread_kill(rank.native_handle(), SIGUSR1), std::this_thread::yield();
  rank.join();
  signal(SIGUSR1, before);
  EXPECT_NE(text.find("got none of rank 1"), std::string::npos) << text;
}

TEST(Sockets, CloseConnectionsOfStrangers) {
  c10d::HashStore store;
  auto first = std::async(std::launch::async, [&] { shutdown(*create(store, {0, 2, 2, "127.0.0.1"}, kTimeout)); });
  const std::vector<uint8_t> text = store.get("address/0");  // waits for it
  const auto port = boost::json::parse(std::string(text.begin(), text.end())).at("port").to_number<uint16_t>();
  sockaddr_in address = local_address(port);
  const Descriptor stranger(socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(connect(stranger.number(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  std::string hello(552, '\0');  // of rank 1, without the secret
  hello[32] = 1;
  ASSERT_EQ(write(stranger.number(), hello.data(), hello.size()), 552);
  auto second = second_rank(store, "127.0.0.1", shutdown);
  char nothing = 0;
  EXPECT_LE(read(stranger.number(), &nothing, 1), 0) << "it is closed";
  first.get();
  second.get();
}

TEST(Sockets, AreNotHeldUpByStrangersThatSayNothing) {
  c10d::HashStore store;
  auto first = std::async(std::launch::async, [&] { shutdown(*create(store, {0, 2, 2, "127.0.0.1"}, kTimeout)); });
  const std::vector<uint8_t> text = store.get("address/0");  // waits for it
  const auto port = boost::json::parse(std::string(text.begin(), text.end())).at("port").to_number<uint16_t>();
  sockaddr_in address = local_address(port);
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 500; ++i) {
    strangers.emplace_back(socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(connect(strangers.back().number(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    if (i % 2 == 0) send(strangers.back().number(), "half a word", 11, MSG_NOSIGNAL);
  }
  second_rank(store, "127.0.0.1", shutdown).get();
  first.get();
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

// Half of the message can be read; the other half must not be made up of the next one. To its sender the other rank is lost,
// which that one must not take for true.
TEST(Sockets, NameARankThatCannotSendAWholeMessage) {
  const auto page = static_cast<size_t>(getpagesize());
  c10d::HashStore store;
  std::promise<void> has_failed;
  std::promise<void> may_leave;
  auto second = second_rank(store, "", [&](Transport& transport) {
    char* const data =
        static_cast<char*>(mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(data + page, page, PROT_NONE);
    const std::vector<char> other(2 * page);
    EXPECT_THROW(
        {
          Request broken = transport.isend(0, 0, data, static_cast<int64_t>(2 * page));
          Request next = transport.isend(0, 1, other.data(), static_cast<int64_t>(2 * page));
          for (;;) transport.progress();
        },
        PeerLostError);
    munmap(data, 2 * page);
    has_failed.set_value();
    may_leave.get_future().wait();
  });
  const auto first = create(store, {0, 2, 2}, kTimeout);
  has_failed.get_future().wait();
  std::vector<char> into(2 * page);
  const std::string text = error_of([&] { first->irecv(1, 0, into.data(), static_cast<int64_t>(into.size())).wait(); });
  EXPECT_EQ(text.rfind("rank 1 (pid ", 0), 0) << text;
  may_leave.set_value();
  second.get();
}

// As workers that load data are, and outlive a rank that is killed.
TEST(Sockets, AreNotKeptOpenByForks) {
  c10d::HashStore store;
  std::promise<void> has_forked;
  auto second = second_rank(store, "", [&](Transport& transport) {
    transport.barrier();
    has_forked.get_future().wait();
  });
  const auto first = create(store, {0, 2, 2}, kTimeout);
  first->barrier();
  int life[2];
  ASSERT_EQ(pipe(life), 0);
  const pid_t fork_of_both = fork();
  if (fork_of_both == 0) {
    close(life[1]);
    char nothing = 0;
    [[maybe_unused]] const ssize_t num_bytes = read(life[0], &nothing, 1);  // until the test is over
    _exit(0);
  }
  has_forked.set_value();
  int value = 0;
  EXPECT_THROW(first->irecv(1, 0, &value, sizeof value).wait(), PeerLostError);
  close(life[0]), close(life[1]);
  waitpid(fork_of_both, nullptr, 0);
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
