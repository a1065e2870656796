// Owns addresses, secrets and the first bytes on every connection.
#include "runtime/transport/socket_rendezvous.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>

#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cstring>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "runtime/transport/error.h"
#include "runtime/watch/peer_processes.h"

namespace smp::runtime::sockets {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;
using Socket = asio::generic::stream_protocol::socket;
using Acceptor = asio::basic_socket_acceptor<asio::generic::stream_protocol>;

constexpr size_t kSecretChars = 32;
// Who has connected and says nothing holds up the others for so long.
constexpr auto kHelloLimit = std::chrono::seconds(5);

enum class Purpose : int32_t { kMessages, kNotices };

// The first bytes from who connects.
struct Hello {
  std::array<char, kSecretChars> secret;  // of who is connected to
  int32_t rank;
  Purpose purpose;
};

// Where a rank listens.
struct Address {
  std::string host;  // empty: a socket of Unix
  int64_t port = 0;
  std::string name;  // of a socket of Unix
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

// Small messages go at once, and the processes that this one starts do not hold connections open.
Descriptor made(Socket socket, bool is_tcp) {
  if (is_tcp) socket.set_option(asio::ip::tcp::no_delay(true));
  fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
  return Descriptor(socket.release());
}

class Meeter {
 public:
  Meeter(c10d::Store& store, const Newcomer& self, std::chrono::milliseconds timeout)
      : store_(store), self_(self), end_(Clock::now() + timeout), timeout_(timeout), acceptor_(io_) {
    meeting_.rank = self.rank;
    meeting_.num_local_ranks = self.num_local_ranks;
    meeting_.messages.resize(static_cast<size_t>(self.size));
    meeting_.notices.resize(static_cast<size_t>(self.size));
  }

  Meeting meet() {
    listen();
    for (int peer = 0; peer < self_.size; ++peer) {
      const Address address = address_of(peer);
      meeting_.identities.push_back(address.identity);
      if (peer < self_.rank) connect(peer, address);
    }
    for (int num_left = 2 * (self_.size - 1 - self_.rank); num_left > 0;) num_left -= accept() ? 1 : 0;
    return std::move(meeting_);
  }

 private:
  void listen() {
    own_ = {self_.host, 0, "smp-" + make_secret(), make_secret(), this_process().serialised()};
    const auto endpoint = endpoint_of(own_);
    acceptor_.open(endpoint.protocol());
    acceptor_.bind(endpoint);
    acceptor_.listen();
    if (!own_.host.empty()) {
      asio::ip::tcp::endpoint bound;
      const auto chosen = acceptor_.local_endpoint();
      std::memcpy(bound.data(), chosen.data(), chosen.size());
      own_.port = bound.port();
    }
    const std::string text = serialised(own_);
    store_.set(key_of(self_.rank), std::vector<uint8_t>(text.begin(), text.end()));
  }

  Address address_of(int peer) {
    try {
      store_.wait({key_of(peer)}, left());
      const std::vector<uint8_t> text = store_.get(key_of(peer));
      return parse(std::string(text.begin(), text.end()));
    } catch (const std::exception& error) {
      throw CommError({.operation = "meeting of " + std::to_string(self_.size) + " ranks", .peer = peer},
                      missing(std::to_string(peer)) + ": " + first_line(error.what()));
    }
  }

  void connect(int peer, const Address& address) {
    for (const Purpose purpose : {Purpose::kMessages, Purpose::kNotices}) {
      Socket socket(io_);
      const auto endpoint = endpoint_of(address);
      socket.open(endpoint.protocol());
      boost::system::error_code error;
      if (socket.connect(endpoint, error)) {
        throw CommError({.operation = "meeting of " + std::to_string(self_.size) + " ranks", .peer = peer},
                        "expected it to be reached at '" + address.host + ":" + std::to_string(address.port) +
                            "', got: " + error.message() +
                            ". MASTER_ADDR decides which addresses are used: give one that all hosts reach.");
      }
      Hello hello{{}, self_.rank, purpose};
      address.secret.copy(hello.secret.data(), kSecretChars);
      asio::write(socket, asio::buffer(&hello, sizeof hello));
      keep(purpose, peer, std::move(socket));
    }
  }

  // True for one that was expected. Others, of anybody who finds the port, are closed.
  bool accept() {
    pollfd waiting{acceptor_.native_handle(), POLLIN, 0};
    if (poll(&waiting, 1, static_cast<int>(left().count())) == 0) {
      std::string ranks;
      for (int peer = self_.rank + 1; peer < self_.size; ++peer)
        if (meeting_.notices[static_cast<size_t>(peer)].number() < 0)
          ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer);
      throw CommError({.operation = "meeting of " + std::to_string(self_.size) + " ranks"}, missing(ranks));
    }
    boost::system::error_code error;
    Socket socket = acceptor_.accept(error);
    if (error) return false;
    pollfd speaking{socket.native_handle(), POLLIN, 0};
    if (poll(&speaking, 1, static_cast<int>(std::chrono::milliseconds(kHelloLimit).count())) != 1) return false;
    Hello hello{};
    socket.non_blocking(true);  // it has come whole, or is none
    asio::read(socket, asio::buffer(&hello, sizeof hello), error);
    socket.non_blocking(false);
    const bool is_known = std::string_view(hello.secret.data(), kSecretChars) == own_.secret;
    if (error || !is_known || hello.rank <= self_.rank || hello.rank >= self_.size) return false;
    return keep(hello.purpose, hello.rank, std::move(socket));
  }

  bool keep(Purpose purpose, int peer, Socket socket) {
    auto& of_purpose = purpose == Purpose::kMessages ? meeting_.messages : meeting_.notices;
    if (of_purpose[static_cast<size_t>(peer)].number() >= 0) return false;
    of_purpose[static_cast<size_t>(peer)] = made(std::move(socket), !own_.host.empty());
    return true;
  }

  std::chrono::milliseconds left() const {
    return std::max(std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now()),
                    std::chrono::milliseconds(1));
  }
  std::string missing(const std::string& ranks) const {
    return "expected all ranks to come within " + std::to_string(timeout_.count() / 1000) + " s, got none of rank " + ranks;
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
