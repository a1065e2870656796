// One rank's end of all its links, and the messages that go over them. Internal to the transport room.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/device/links.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// What all groups of one rank share. A message is a header that finds its receive, an answer that says when, a transfer
/// that is started on both ends, and word that the sender's device has been given it: a rank that waited for its own device
/// behind half a transfer would answer nobody.
class LinkEnd final : public RequestPool {
 public:
  /// links_all: memory of the host, too.
  LinkEnd(std::shared_ptr<Transport> world, const DeviceLinks& links, bool links_all);
  ~LinkEnd();
  LinkEnd(const LinkEnd&) = delete;
  LinkEnd& operator=(const LinkEnd&) = delete;

  bool is_linked(const DeviceMemory& memory) const { return links_all_ || memory.device != host().type; }

  /// group: of the inner transport. peer: world rank.
  Request isend(Transport& group, int dest, int peer, int tag, const DeviceMemory& from);
  Request irecv(Transport& group, int source, int peer, int tag, const DeviceMemory& into);
  bool test(uint32_t number, int64_t* num_bytes) override;
  int64_t wait(uint32_t number, std::string_view action) override;
  void drop(uint32_t number) noexcept override { slots_[number].is_dropped = true; }

  /// Moves on what can be moved on. Never blocks.
  void move();
  /// Returns when all that is moving has arrived, also where nobody asks for it any more.
  void settle();

 private:
  struct Header {
    uint32_t magic = 0x736d706c;  // "smpl"
    uint32_t number = 0;          // of the sender's slot
    int64_t num_bytes = 0;
  };
  // What a receiver tells the sender of a header.
  struct Go {
    uint32_t number = 0;
    bool is_refused = false;  // it is too long: none is started
    bool has_name = false;
    std::array<char, 128> name{};  // of the link, once
  };
  enum class State {
    kPosted,   // the header
    kStarted,  // on this end of the link
    kIssued,   // to this rank's device
    kGiven,    // to both
    kRefused,
  };

  struct Slot {
    uint32_t number = 0;
    bool is_receive = false, is_dropped = false;
    int peer = 0, tag = 0;
    DeviceMemory memory{};
    const Device* device = nullptr;
    State state = State::kPosted;
    Event event;  // behind which it may start; once it is given, its end
    Header header;
    Request posted;    // the header
    Go go;             // of a receive
    Request answered;  // that; of a send, word that it is given
    std::string refusal;
  };

  // The transfers of one way, in the order of their start.
  struct Way {
    std::unique_ptr<DeviceLink> link;
    std::deque<uint32_t> started;
  };
  struct Peer {
    Way to, from;
    size_t num_unanswered = 0;  // headers
    bool is_listening = false;
    Go heard;
    Request answer{};
    bool awaits_given = false;
    Request given{};  // the transfer in front of `from`
  };

  Slot& take(int peer, int tag, const DeviceMemory& memory);
  void free(Slot& slot);
  bool is_done(Slot& slot);
  int64_t finish(Slot& slot, std::string_view action);
  CommError::Where where_of(const Slot& slot, std::string_view action, double seconds) const;

  void find(Slot& slot);
  void hear(int rank);
  Slot& announced(uint32_t number, int peer);
  static void copy_own(Slot& received, Slot& sent);

  template <class Call>
  auto naming(const Slot& slot, const Call& call);
  void connect(Way& way, const Slot& slot, std::string_view name, DeviceLinks::End end);
  void start(Way& way, Slot& slot, int64_t num_bytes);
  std::optional<Event> next_given(const Way& way, const Slot& slot);
  void look_at_sent(Way& to);
  void look_at_received(Peer& peer);
  static void give(Slot& slot, Event end);
  static void refuse(Slot& slot, std::string why);

  std::shared_ptr<Transport> world_;
  std::shared_ptr<Transport> answers_;
  const DeviceLinks& links_;
  const bool links_all_;
  std::deque<Slot> slots_;
  std::vector<uint32_t> free_, under_way_;
  std::deque<Peer> peers_;      // by world rank
  std::exception_ptr failure_;  // of a link: from then on its ends differ
};

}  // namespace smp::runtime
