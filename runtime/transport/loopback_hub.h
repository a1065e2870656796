// Owns the state that the ranks of a LoopbackWorld share: messages, meetings, who waits for what.
// Internal to the loopback; the transport on top of it is in loopback.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "runtime/device/device.h"

namespace smp::runtime {

/// What a rank posts: one send, receive or collective.
struct LoopbackPosted {
  enum class Kind : uint8_t { kSend, kReceive, kCollective };

  Kind kind = Kind::kSend;
  int peer = 0;  // a world rank
  int tag = 0;
  uint32_t group = 0;
  DeviceMemory memory{};  // a receive: at most so many bytes
  Event reached{};        // the memory may be read, or written to
};

/// And what becomes of it.
struct LoopbackMessage : LoopbackPosted {
  enum class State : uint8_t { kPosted, kDone, kTruncated };

  bool is_dropped = false;
  std::atomic<State> state = State::kPosted;
  int owner = 0;            // a world rank
  int64_t moved_bytes = 0;  // of the matching message
  Event moved{};            // all of them
  std::string collective;   // what a collective is called in errors; equal on all its members
};

/// All calls name the calling world rank; each rank calls from one thread at a time.
class LoopbackHub {
 public:
  using Milliseconds = std::chrono::milliseconds;
  /// Returns when the contributions may be used again.
  using Combine = std::function<void(const std::vector<void*>& contributions)>;

  explicit LoopbackHub(int size);

  uint32_t post(int rank, const LoopbackPosted& posted);
  /// Joins a collective; the last of `members` to come runs `combine` over all contributions, in
  /// the order of the members. Differing names fail the world.
  uint32_t meet(int rank, uint32_t group, const std::vector<int>& members, std::string name, void* contribution,
                const Combine& combine);
  bool test(int rank, uint32_t slot, int64_t* num_bytes);
  int64_t wait(int rank, uint32_t slot, std::string_view action, Milliseconds timeout);
  void drop(int rank, uint32_t slot) noexcept;

  /// The same number for the n-th call of each member with the same arguments.
  uint32_t group_id(int rank, uint32_t parent, const std::vector<int>& members);
  /// False when another rank has aborted, or all have failed, before.
  bool abort(int rank, std::string_view message);
  void leave(int rank);
  /// Throws CommError with all messages that nobody took, unless the world has failed before.
  void close();
  void throw_if_failed() const;

 private:
  struct Slot {
    int rank;
    uint32_t slot;
  };
  struct Rank {
    std::deque<LoopbackMessage> messages;
    std::vector<uint32_t> free_slots;      // the rank's own thread
    std::vector<uint32_t> finished_drops;  // under mutex_
    std::vector<uint32_t> receives;        // posted, unmatched, in order
    std::vector<Slot> arrivals;            // sends to this rank, unmatched, in order
    std::condition_variable wake;
    std::optional<uint32_t> waits_for;
    std::string action;
    bool has_left = false;
  };
  struct Meeting {
    std::vector<Slot> slots;
    std::vector<void*> contributions;
    int num_arrived = 0;
  };

  uint32_t take_slot(int rank);
  LoopbackMessage& at(Slot slot) { return rank_at(slot.rank).messages[slot.slot]; }
  Rank& rank_at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  void match_send(int rank, uint32_t slot);
  void match_receive(int rank, uint32_t slot);
  void move(Slot send, Slot receive);
  void finish(Slot slot, LoopbackMessage::State state);
  int64_t take_result(int rank, uint32_t slot, std::string_view action);
  void check_meeting(const Meeting& meeting);
  void fail(std::string text);
  void check_deadlock();
  std::string waiting_text();

  mutable std::mutex mutex_;
  std::deque<Rank> ranks_;
  std::map<uint32_t, Meeting> meetings_;  // by group
  std::map<std::tuple<uint32_t, std::vector<int>, int>, uint32_t> group_ids_;
  std::map<std::tuple<int, uint32_t, std::vector<int>>, int> num_group_calls_;
  std::atomic<bool> has_failed_ = false;
  std::string failure_;
  int aborted_by_ = -1;
};

}  // namespace smp::runtime
