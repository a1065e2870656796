// Owns addresses, secrets and the first bytes on every connection.
#include "runtime/transport/socket_rendezvous.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <list>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "runtime/transport/error.h"
#include "runtime/watch/peer_processes.h"

namespace smp::runtime::sockets {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;
using Socket = asio::generic::stream_protocol::socket;
using Acceptor = asio::basic_socket_acceptor<asio::generic::stream_protocol>;

constexpr size_t kSecretChars = 32;
constexpr size_t kNameChars = 36;
constexpr size_t kIdentityChars = 512;  // most of them
constexpr size_t kMostGuests = 64;      // that have connected and not yet said who they are, each with the memory of a Hello
constexpr auto kWelcomeLimit = std::chrono::milliseconds(30000);
constexpr auto kRetryInterval = std::chrono::milliseconds(20);

enum class Purpose : int32_t { kMessages, kNotices };

// The first bytes from who connects.
struct Hello {
  std::array<char, kSecretChars> secret;  // of who is connected to
  int32_t rank;
  Purpose purpose;
  std::array<char, kIdentityChars> identity;
};

// Where a rank listens.
struct Address {
  std::string host;  // empty: a socket of Unix
  int64_t port = 0;
  std::string name;  // of a socket of Unix, and the answer to a Hello
  std::string secret;
  std::string identity;
};

std::string make_secret() {
  std::array<unsigned char, kSecretChars / 2> random{};
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size()))
    throw CommError(std::string("socket transport: expected random bytes of the system, got: ") + strerror(errno));
  std::string secret;
  for (const unsigned char byte : random) {
    secret += "0123456789abcdef"[byte >> 4];
    secret += "0123456789abcdef"[byte & 15];
  }
  return secret;
}

asio::generic::stream_protocol::endpoint endpoint_of(const Address& address) {
  // In the abstract namespace: no file, gone with its socket.
  if (address.host.empty()) return asio::local::stream_protocol::endpoint(std::string(1, '\0') + address.name);
  return asio::ip::tcp::endpoint(asio::ip::make_address(address.host), static_cast<uint16_t>(address.port));
}

std::string serialised(const Address& address) {
  return boost::json::serialize(boost::json::object{{"host", address.host},
                                                    {"port", address.port},
                                                    {"name", address.name},
                                                    {"secret", address.secret},
                                                    {"identity", address.identity}});
}

Address parse(const std::string& text) {
  const boost::json::value value = boost::json::parse(text);
  const auto string = [&](const char* key) { return std::string(value.at(key).as_string()); };
  return {string("host"), value.at("port").to_number<int64_t>(), string("name"), string("secret"), string("identity")};
}

std::string key_of(int rank) { return "address/" + std::to_string(rank); }

// A host that cannot be reached is missed after 14 s: its kernel, which answers for ranks that compute or are stopped, does
// not answer. On the connections of notices at least, where nothing is under way. TCP_USER_TIMEOUT would also break those
// whose receiver computes, with its buffers full.
void miss_unreachable_hosts(int socket) {
  const int is_on = 1, idle_s = 5, interval_s = 3, num_probes = 3;
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &is_on, sizeof is_on);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &num_probes, sizeof num_probes);
}

// Small messages go at once, and the processes that this one starts do not hold connections open.
Descriptor made(Socket socket, bool is_tcp) {
  if (is_tcp) {
    socket.set_option(asio::ip::tcp::no_delay(true));
    miss_unreachable_hosts(socket.native_handle());
  }
  fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
  return Descriptor(socket.release());
}

// Reads as many bytes as asked for, within `limit`.
bool read_whole(Socket& socket, void* data, size_t num_bytes, std::chrono::milliseconds limit) {
  const timeval time{limit.count() / 1000, limit.count() % 1000 * 1000};
  setsockopt(socket.native_handle(), SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
  return recv(socket.native_handle(), data, num_bytes, MSG_WAITALL) == static_cast<ssize_t>(num_bytes);
}

// In a time that does not depend on where they differ.
bool are_equal(std::string_view a, std::string_view b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

bool write_whole(Socket& socket, const void* data, size_t num_bytes) {  // which fit into the system's buffer
  return send(socket.native_handle(), data, num_bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(num_bytes);
}

class Meeter {
 public:
  Meeter(c10d::Store& store, const Newcomer& self, std::chrono::milliseconds timeout)
      : store_(store), self_(self), end_(Clock::now() + timeout), timeout_(timeout), acceptor_(io_) {
    meeting_.rank = self.rank;
    meeting_.num_local_ranks = self.num_local_ranks;
    meeting_.identities.resize(static_cast<size_t>(self.size));
    meeting_.messages.resize(static_cast<size_t>(self.size));
    meeting_.notices.resize(static_cast<size_t>(self.size));
  }

  Meeting meet() {
    listen();
    for (int peer = 0; peer < self_.rank; ++peer) connect(peer);
    // Those who read it find a rank that accepts.
    const std::string text = serialised(own_);
    store_.set(key_of(self_.rank), std::vector<uint8_t>(text.begin(), text.end()));
    receive_the_others();
    return std::move(meeting_);
  }

 private:
  void listen() {
    own_ = {self_.host, 0, "smp-" + make_secret(), make_secret(), this_process().serialised()};
    const auto endpoint = endpoint_of(own_);
    acceptor_.open(endpoint.protocol());
    acceptor_.bind(endpoint);
    acceptor_.listen();
    acceptor_.non_blocking(true);  // who has connected may be gone again
    meeting_.identities[static_cast<size_t>(self_.rank)] = own_.identity;
    if (!own_.host.empty()) {
      asio::ip::tcp::endpoint bound;
      const auto chosen = acceptor_.local_endpoint();
      std::memcpy(bound.data(), chosen.data(), chosen.size());
      own_.port = bound.port();
    }
  }

  Address address_of(int peer) {
    try {
      store_.wait({key_of(peer)}, left());
      const std::vector<uint8_t> text = store_.get(key_of(peer));
      return parse(std::string(text.begin(), text.end()));
    } catch (const std::exception& error) {
      fail(peer, missing(std::to_string(peer)) + ": " + first_line(error.what()));
    }
  }

  // torchrun keeps its store when it starts all ranks anew, and its hosts count attempts differently. So an address may be
  // of a process that is gone, until the one in its place has written its own.
  void connect(int peer) {
    for (;;) {
      const Address address = address_of(peer);
      const std::string complaint = complaint_of_connecting(peer, address);
      if (complaint.empty()) return;
      if (Clock::now() >= end_) {
        fail(peer, "expected it to be reached at '" + address.host + ":" + std::to_string(address.port) + "', got: " +
                       complaint + ". MASTER_ADDR decides which addresses are used: give one that all hosts reach.");
      }
      std::this_thread::sleep_for(kRetryInterval);
    }
  }

  std::string complaint_of_connecting(int peer, const Address& address) {
    for (const Purpose purpose : {Purpose::kMessages, Purpose::kNotices}) {
      Socket socket(io_);
      const auto endpoint = endpoint_of(address);
      socket.open(endpoint.protocol());
      boost::system::error_code error;
      if (socket.connect(endpoint, error)) return error.message();
      Hello hello{{}, self_.rank, purpose, {}};
      address.secret.copy(hello.secret.data(), kSecretChars);
      own_.identity.copy(hello.identity.data(), kIdentityChars - 1);
      std::array<char, kNameChars> welcome{};
      if (!write_whole(socket, &hello, sizeof hello) ||
          !read_whole(socket, welcome.data(), welcome.size(), std::min(left(), kWelcomeLimit)) ||
          std::string_view(welcome.data(), welcome.size()) != address.name)
        return "no answer of a rank of this job";
      keep(purpose, peer, std::move(socket));
    }
    meeting_.identities[static_cast<size_t>(peer)] = address.identity;
    return "";
  }

  // Who has connected, and what of its Hello has come.
  struct Guest {
    Socket socket;
    Hello hello{};
    size_t num_bytes = 0;
    bool has_gone = false;

    bool has_said_all() const { return num_bytes == sizeof hello; }
    void listen() {
      char* const rest = reinterpret_cast<char*>(&hello) + num_bytes;
      const ssize_t come = recv(socket.native_handle(), rest, sizeof hello - num_bytes, MSG_DONTWAIT);
      if (come > 0) num_bytes += static_cast<size_t>(come);
      has_gone = come == 0 || (come < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    }
  };

  // Anybody who finds the port may connect and say nothing, as often as it likes: nobody waits for it, and the oldest of too
  // many that have not said all go.
  void receive_the_others() {
    std::list<Guest> guests;
    for (int num_left = 2 * (self_.size - 1 - self_.rank); num_left > 0;) {
      wait_for_a_word(guests);
      boost::system::error_code error;
      for (size_t accepted = 0; accepted < kMostGuests; ++accepted) {
        Socket socket = acceptor_.accept(error);
        if (error) break;
        guests.push_back(Guest{std::move(socket)});
      }
      for (auto guest = guests.begin(); guest != guests.end();) {
        guest->listen();
        if (guest->has_said_all()) num_left -= admit(std::move(*guest)) ? 1 : 0;
        guest = guest->has_gone || guest->has_said_all() ? guests.erase(guest) : std::next(guest);
      }
      while (guests.size() > kMostGuests) guests.pop_front();
    }
  }

  void wait_for_a_word(const std::list<Guest>& guests) {
    std::vector<pollfd> waiting{{acceptor_.native_handle(), POLLIN, 0}};
    for (const Guest& guest : guests) waiting.push_back({const_cast<Socket&>(guest.socket).native_handle(), POLLIN, 0});
    const auto limit_ms = static_cast<int>(std::min<int64_t>(left().count(), std::numeric_limits<int>::max()));
    if (poll(waiting.data(), waiting.size(), limit_ms) == 0 || Clock::now() >= end_) {
      std::string ranks;
      for (int peer = self_.rank + 1; peer < self_.size; ++peer)
        if (meeting_.notices[static_cast<size_t>(peer)].number() < 0)
          ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer);
      fail(/*peer=*/-1, missing(ranks));
    }
  }

  // True for one that was expected. Others are closed.
  bool admit(Guest guest) {
    const Hello& hello = guest.hello;
    const bool is_known = are_equal({hello.secret.data(), kSecretChars}, own_.secret);
    if (!is_known || hello.rank <= self_.rank || hello.rank >= self_.size) return false;
    if (!write_whole(guest.socket, own_.name.data(), kNameChars)) return false;
    const std::string_view identity(hello.identity.data(), strnlen(hello.identity.data(), kIdentityChars));
    meeting_.identities[static_cast<size_t>(hello.rank)] = identity;
    return keep(hello.purpose, hello.rank, std::move(guest.socket));
  }

  // True for the first. A later one is of the same rank, which was started anew or has had no answer.
  bool keep(Purpose purpose, int peer, Socket socket) {
    auto& of_purpose = purpose == Purpose::kMessages ? meeting_.messages : meeting_.notices;
    Descriptor& kept = of_purpose[static_cast<size_t>(peer)];
    const bool is_first = kept.number() < 0;
    kept = made(std::move(socket), !own_.host.empty());
    return is_first;
  }

  [[noreturn]] void fail(int peer, const std::string& reason) const {
    const CommError::Where where{.operation = "meeting of " + std::to_string(self_.size) + " ranks", .peer = peer};
    throw HangError(where.text() + ": " + reason, {});
  }
  std::chrono::milliseconds left() const {
    return std::max(std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now()),
                    std::chrono::milliseconds(1));
  }
  std::string missing(const std::string& ranks) const {
    const bool is_loopback = !own_.host.empty() && asio::ip::make_address(own_.host).is_loopback();
    return "expected all ranks to come within " + std::to_string(timeout_.count() / 1000) + " s, got none of rank " + ranks +
           (is_loopback ? ". MASTER_ADDR is an address that no other host reaches: give that of rank 0 in their network"
                        : "");
  }
  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  c10d::Store& store_;
  const Newcomer& self_;
  Clock::time_point end_;
  std::chrono::milliseconds timeout_;
  asio::io_context io_;
  Acceptor acceptor_;
  Address own_;
  Meeting meeting_;
};

}  // namespace

Meeting meet(c10d::Store& store, const Newcomer& self, std::chrono::milliseconds timeout) {
  try {
    return Meeter(store, self, timeout).meet();
  } catch (const boost::system::system_error& error) {
    throw CommError({.operation = "meeting of " + std::to_string(self.size) + " ranks"},
                    std::string("expected sockets to connect, got: ") + error.what());
  }
}

}  // namespace smp::runtime::sockets
