// Owns the contract of every transport: messages between ranks, and a few collectives on top.
// Knows neither schedules nor tensors; a buffer is memory of a device.
#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/device/memory.h"
#include "runtime/transport/error.h"

namespace smp::runtime {

/// What a transport keeps for the messages that are under way; a Request is a claim on one slot.
/// Only Request calls this. A slot is given back by a test or wait that succeeds, or by drop.
class RequestPool {
 public:
  /// True when the message of `slot` is complete; then *num_bytes is its length and the slot is free.
  virtual bool test(uint32_t slot, int64_t* num_bytes) = 0;
  /// Waits until it is complete, frees the slot and returns the length of the message.
  virtual int64_t wait(uint32_t slot, std::string_view action) = 0;
  /// Nobody will ask for `slot` again; the message itself goes on, and the slot is freed behind it.
  virtual void drop(uint32_t slot) noexcept = 0;

 protected:
  ~RequestPool() = default;
};

/// One message under way, sent or received. Moves, does not copy; an empty one is complete.
///
/// The buffer given to isend or irecv must stay alive until test() has said true or wait() has returned. A Request that is
/// dropped earlier lets its message go on: keep that buffer until shutdown. The Transport must outlive its Requests.
class [[nodiscard]] Request {
 public:
  Request() = default;
  Request(RequestPool& pool, uint32_t slot) : pool_(&pool), slot_(slot) {}
  Request(Request&& other) noexcept { swap(other); }
  Request& operator=(Request&& other) noexcept {
    Request(std::move(other)).swap(*this);
    return *this;
  }
  ~Request() {
    if (pool_ != nullptr) pool_->drop(slot_);
  }

  /// Is the message complete? Never blocks. Throws CommError (a truncated message, a failed peer).
  bool test() {
    if (pool_ == nullptr) return true;
    if (!pool_->test(slot_, &num_bytes_)) return false;
    pool_ = nullptr;
    return true;
  }

  /// Waits for the message and returns its length in bytes; again at once when asked again. action: what this rank is doing,
  /// for the error text ("2F0"). Throws CommError after the time-out, for a truncated message, or when a peer has failed.
  int64_t wait(std::string_view action = {}) {
    if (pool_ == nullptr) return num_bytes_;
    num_bytes_ = pool_->wait(slot_, action);
    pool_ = nullptr;
    return num_bytes_;
  }

 private:
  void swap(Request& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(slot_, other.slot_);
    std::swap(num_bytes_, other.num_bytes_);
  }

  RequestPool* pool_ = nullptr;
  uint32_t slot_ = 0;
  int64_t num_bytes_ = 0;
};

/// The messages of one rank with the others of its process group.
///
/// The rule: one thread at a time, the rank's own. Nothing moves behind its back, so a rank that
/// computes for long calls progress() between operators.
///
///   Request sent = transport.isend(1, 7, memory_of(x));   // x stays alive until sent.wait()
///   transport.irecv(1, 7, memory_of(y)).wait("2F0");
///   sent.wait("2F0");
///
/// Messages between two ranks with the same tag arrive in the order in which they were sent. An isend may return before the
/// data has left, and may complete only when the receiver asks for the message: two ranks that both wait for their isend
/// before they call irecv may wait for each other for ever. Collectives are called by all members of the group in the same
/// order. Every wait ends after the time-out, with CommError; every call throws
/// AbortedError or PeerLostError when a peer has ended the job or has died. Ranks in calls are ranks of this group, in
/// errors of the world.
class Transport {
 public:
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  /// This rank's index in the group, 0 <= rank() < size().
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Sends a message of `from` (0 bytes allowed) to `dest` (itself allowed). Throws c10::ValueError when dest, tag (0 ...
  /// kMaxTag) or the number of bytes is out of range, or `from` is memory of a device that the transport does not send from.
  virtual Request isend(int dest, int tag, const DeviceMemory& from) = 0;
  /// Receives at most as many bytes as `into` has; a longer message makes test() and wait() throw CommError.
  virtual Request irecv(int source, int tag, const DeviceMemory& into) = 0;
  /// The same on memory of the host.
  Request isend(int dest, int tag, const void* data, int64_t num_bytes) {
    return isend(dest, tag, {const_cast<void*>(data), num_bytes});  // which isend only reads
  }
  Request irecv(int source, int tag, void* data, int64_t max_bytes) { return irecv(source, tag, {data, max_bytes}); }
  /// Whether messages may be memory of that kind of device; else a staged transport is put before it.
  virtual bool moves_memory_of(c10::DeviceType device) const { return device == DeviceMemory().device; }
  /// Moves everything that is under way a little on. Throws when a peer has failed; never blocks.
  virtual void progress() = 0;

  /// The sub-group of `ranks` (of this group, this rank among them; their order numbers them anew).
  /// Collective over the members only. Its messages never mix with those of another group.
  virtual std::shared_ptr<Transport> group(const std::vector<int>& ranks) = 0;

  /// Returns when what is moving has arrived, also on devices. Before the world is left, ahead of a barrier.
  virtual void settle() {}

  /// Frees what a sub-group holds of the transport's limited numbers. Collective over its members, when nothing is under
  /// way; no call of it may follow.
  virtual void end_group() {}

  /// Replaces `terms` by the sum over all ranks, added in the order of the ranks: the same bits on
  /// every rank, in every run and over every transport. Float, Double, Long; BFloat16 and Half are
  /// summed in float32 and rounded once. All ranks give memory of one kind of device, where the sum is made. Throws
  /// c10::TypeError for other types. By messages of the tags kSumTag and
  /// kSumTag + 1 (running_sum.cpp), unless the transport has a way of its own.
  virtual void all_reduce_sum(const DeviceMemory& terms, c10::ScalarType type);
  void all_reduce_sum(void* data, int64_t num_elements, c10::ScalarType type) {
    all_reduce_sum({data, num_elements * static_cast<int64_t>(c10::elementSize(type))}, type);
  }
  /// Copies the bytes of rank `root` to all others. After a CommError of a collective, as with a Request that is dropped,
  /// its message goes on: keep the buffer (keeping() of abandoned.h).
  virtual void broadcast(const DeviceMemory& bytes, int root) = 0;
  void broadcast(void* data, int64_t num_bytes, int root) { broadcast({data, num_bytes}, root); }
  /// Every rank's bytes, of any length each, by rank.
  virtual std::vector<std::string> all_gather(std::string_view bytes) = 0;
  /// Returns when every rank has called it.
  virtual void barrier() = 0;

  /// Of all waits from now on, in every group.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// What the rank is doing, in words: other ranks that wait for it in vain ask. Called on the rank's own thread, while it
  /// waits or calls progress().
  virtual void describe_by(const std::function<std::string()>& /*doing*/) {}
  /// What else moves messages of this rank, by calls of this world that do not wait: called on the rank's own thread, while
  /// it waits for another process.
  virtual void do_beside(const std::function<void()>& /*move*/) {}
  /// Waits until is_done(), which is called again and again and tests messages of this world. where(seconds): for what, in
  /// the HangError after the time-out.
  virtual void wait_until(const std::function<bool()>& is_done, const std::function<CommError::Where(double)>& where) = 0;

  /// Ends the job: the next or present call of every other rank of the world throws
  /// AbortedError(rank, message). Returns after at most a second, whether they have heard it or
  /// not. False where this rank has heard of another rank's failure before: then that one counts.
  virtual bool abort(std::string_view message) noexcept = 0;

  /// For a process that a failure ends, once it has printed all but its last line. Who has aborted returns when the others
  /// have come here too, or are gone: its line is the last. Who has heard of another rank's failure returns when that rank
  /// is gone, because a launcher kills the others as soon as one ends. Takes at most two seconds.
  virtual void end_in_order() noexcept = 0;

  /// A string of a length that the receiver does not know: length first, then the bytes, in parts
  /// of at most `part_bytes`, because one message of MPI carries less than 2 GiB. Both block. No more memory than one part
  /// beyond what has arrived is taken for a length that is wrong. action: for error texts.
  void send_bytes(int dest, int tag, std::string_view bytes, int64_t part_bytes = kPartBytes);
  /// Starts what send_bytes does. `*num_bytes`, the length of `bytes`, stays alive as they do.
  std::vector<Request> isend_bytes(int dest, int tag, std::string_view bytes, const int64_t* num_bytes,
                                   int64_t part_bytes = kPartBytes);
  std::string receive_bytes(int source, int tag, int64_t part_bytes = kPartBytes,
                            const std::string& action = "receive_bytes");
  static constexpr int64_t kPartBytes = int64_t{1} << 30;

 protected:
  Transport() = default;
};

/// Largest tag. MPI_TAG_UB is 2^23 - 1 with UCX.
constexpr int kMaxTag = (1 << 23) - 1;
/// All tags below are the callers'.
constexpr int kSumTag = kMaxTag - 1;
/// Default of every transport: longer than any step, short enough that a hung job ends.
constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::seconds(120);

}  // namespace smp::runtime
