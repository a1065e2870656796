// Owns one connection with another rank: messages with a header, both ways. Internal to the socket transport.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace smp::runtime::sockets {

/// What goes before the bytes of every message, in the byte order of the machine.
struct MessageHeader {
  uint64_t channel = 0;
  int64_t num_bytes = 0;
  int32_t tag = 0;
  int32_t unused = 0;  // the same bytes on every machine

  bool matches(uint64_t other_channel, int other_tag) const { return channel == other_channel && tag == other_tag; }
};
static_assert(sizeof(MessageHeader) == 24);

/// A file descriptor that is closed with its owner. Forks of this process do not share it: theirs reads and writes nothing,
/// so they neither take what comes for this rank nor hide that it has ended.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number);
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  int number() const { return number_; }

 private:
  int number_ = -1;
};

class SocketLink {
 public:
  /// Who sends and receives over it.
  class Owner {
   public:
    /// Where the bytes of the message that begins go, as many as its header says; null: nowhere.
    virtual char* begin(const MessageHeader& header) = 0;
    /// All bytes of that message are there.
    virtual void end() = 0;
    /// The bytes of the send with that number may change.
    virtual void sent(uint32_t number) = 0;

   protected:
    ~Owner() = default;
  };

  /// socket: connected, of streams.
  SocketLink(Descriptor socket, Owner& owner);

  int descriptor() const { return socket_.number(); }

  /// Sends `data` behind everything that was given before; it stays alive until Owner::sent(number). What the other end
  /// does not take at once waits for write().
  void send(const MessageHeader& header, const void* data, uint32_t number);
  /// Never blocks. A connection that has ended takes everything: read() tells.
  void write();
  bool has_to_write() const { return !outgoing_.empty(); }
  /// Reads what has come. Never blocks. False when the connection has ended.
  bool read();

 private:
  struct Outgoing {
    MessageHeader header;
    const char* data;
    uint32_t number;
    int64_t num_written = 0;  // of header and data
  };
  void consume(const char* data, int64_t num_bytes);
  void begin_message();

  Descriptor socket_;
  Owner* owner_;
  std::deque<Outgoing> outgoing_;
  std::vector<char> buffer_;
  MessageHeader incoming_;
  int64_t num_header_bytes_ = 0;  // of incoming_ that have come
  char* into_ = nullptr;          // where its next bytes go
  int64_t num_left_ = 0;          // of its bytes
};

}  // namespace smp::runtime::sockets
