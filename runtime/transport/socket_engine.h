// Owns what all groups of one rank share that is connected with the others by sockets: messages under way, and waiting for
// them. Internal to the socket transport.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/transport/error.h"
#include "runtime/transport/socket_link.h"
#include "runtime/transport/socket_rendezvous.h"
#include "runtime/transport/transport.h"
#include "runtime/transport/world_watch.h"

namespace smp::runtime::sockets {

/// One rank's end of the world. Nothing moves unless this rank calls: there is no thread.
///
/// A message is sent whether it is asked for or not, and waits at the receiver, so a send never waits for a receive unless
/// the receiver does not call at all. Notices of failure have connections of their own: a large message does not hold them
/// up, and one that is broken off does not garble them.
class Engine final : public RequestPool, private NoticeCarrier {
 public:
  Engine(Meeting meeting, std::chrono::milliseconds timeout);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int world_rank() const { return watch_.rank(); }
  int world_size() const { return watch_.size(); }

  /// channel: of the group; messages of two channels never meet. peer: world rank.
  Request isend(uint64_t channel, int peer, int tag, const void* data, int64_t num_bytes);
  Request irecv(uint64_t channel, int peer, int tag, void* data, int64_t max_bytes);
  bool test(uint32_t slot, int64_t* num_bytes) override;
  int64_t wait(uint32_t slot, std::string_view action) override;
  void drop(uint32_t slot) noexcept override;

  void progress();
  /// What fails in this world.
  WorldWatch& watch() { return watch_; }
  /// Tells the others that the end of this rank's connections is no failure, and hears it of them. After a barrier.
  void leave();

 private:
  struct Slot {
    bool is_receive = false;
    bool is_done = false;
    bool is_dropped = false;
    int peer = 0;
    int tag = 0;
    uint64_t channel = 0;
    char* data = nullptr;
    int64_t max_bytes = 0;
    int64_t num_bytes = 0;  // that have been sent
  };
  // A message for which nobody has asked yet.
  struct Unexpected {
    MessageHeader header;
    std::string bytes;
  };

  // The messages of one peer.
  struct Messages final : SocketLink::Owner {
    explicit Messages(Engine& owner) : engine(&owner) {}
    char* begin(const MessageHeader& header) override;
    void end() override;
    void sent(uint32_t number) override;
    std::optional<uint32_t> take_posted(const MessageHeader& header);

    Engine* engine;
    std::vector<uint32_t> posted;        // receives, in their order
    std::deque<Unexpected> unexpected;   // in their order
    std::optional<uint32_t> receiving;   // of the message that comes in, if it was asked for
    Unexpected coming;                   // that message, if it was not
    std::unique_ptr<SocketLink> link{};  // none to itself
  };

  // The notices of one peer.
  struct Notices final : SocketLink::Owner {
    explicit Notices(Engine& owner) : engine(&owner) {}
    char* begin(const MessageHeader& header) override;
    void end() override;
    void sent(uint32_t /*number*/) override {}

    Engine* engine;
    int tag = 0;
    Notice coming;
    bool has_left = false;
    std::unique_ptr<SocketLink> link{};
  };

  uint32_t take_slot(const Slot& message);
  Slot& at(uint32_t slot) { return slots_[slot]; }
  void free_slot(uint32_t slot) { free_slots_.push_back(slot); }
  void finish(uint32_t slot);
  void deliver(const Unexpected& message, uint32_t slot);
  bool look(uint32_t slot, int64_t* num_bytes, std::string_view action);
  CommError::Where where_of(const Slot& message, std::string_view action, double seconds) const;
  void move();
  void read_notices(int peer);
  void look_around();

  void send_notice(const Notice& notice, int peer) noexcept override;
  bool drive_notices() noexcept override;
  std::optional<Notice> receive_notice() override;
  void give_up_messages() noexcept override;

  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  uint32_t num_looks_ = 0;
  bool has_given_up_ = false;

  std::deque<Messages> messages_;  // by world rank
  std::deque<Notices> notices_;    // by world rank
  std::deque<Notice> come_;
  std::optional<int> lost_;  // a peer whose connections have ended
  Descriptor message_events_;
  Descriptor notice_events_;
  WorldWatch watch_;
};

}  // namespace smp::runtime::sockets
