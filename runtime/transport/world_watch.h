// Owns how a rank waits in a world whose other ranks may fail: how their failures reach it, and its own reaches them.
// Internal to the transport room.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "runtime/transport/backoff.h"
#include "runtime/transport/error.h"
#include "runtime/watch/peer_processes.h"
#include "runtime/watch/termination.h"
#include "runtime/watch/wait_limit.h"

namespace smp::runtime {

/// What ranks tell each other of a failure.
struct Notice {
  enum class Kind : int32_t { kAborted, kPeerLost, kQuiet, kQuestion, kAnswer, kStackQuestion, kStack };
  Kind kind = Kind::kAborted;
  /// That failed, died, has printed all but its last line, asks or answers; or whose stack is told.
  int32_t rank = 0;
  int32_t num_chars = 0;
  char text[4000];

  /// Of the bytes that have to be sent.
  int num_bytes() const { return static_cast<int>(offsetof(Notice, text)) + num_chars; }
  std::string content() const { return {text, static_cast<size_t>(num_chars)}; }
};

/// What notices travel by, apart from all messages.
class NoticeCarrier {
 public:
  /// Starts to send `notice`, which stays as it is. A peer that is gone is none to tell.
  virtual void send_notice(const Notice& notice, int peer) noexcept = 0;
  /// Moves what has been started. Is all of it on its way?
  virtual bool drive_notices() noexcept = 0;
  /// One that has come. Never blocks. Throws CommError.
  virtual std::optional<Notice> receive_notice() = 0;
  /// This rank has failed: nothing may be written any more to the buffers of messages under way.
  virtual void give_up_messages() noexcept = 0;

 protected:
  ~NoticeCarrier() = default;
};

/// One rank's view of a world that may fail.
///
/// A rank that fails sends the others a Notice; they look for it while they wait or call look_around(). Who is killed sends
/// nothing, so they also see, every 0.2 s or at once after a launcher's SIGTERM, whether the processes of their host are
/// alive. Who has waited for too long asks all others what they are doing; a rank that hangs is the one that does not
/// answer, and a rank of its host has its process tell where it is.
class WorldWatch {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// identities: of all ranks, as ProcessIdentity::serialised. num_local_ranks: of this host, which share its cores.
  /// timeout: of every wait.
  WorldWatch(NoticeCarrier& carrier, int rank, const std::vector<std::string>& identities, int num_local_ranks,
             Milliseconds timeout);

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Throws what has failed before, if anything has.
  void throw_if_failed() const {
    if (failure_) [[unlikely]]
      std::rethrow_exception(failure_);
  }
  bool has_failed() const { return failure_ != nullptr; }

  /// Throws when this or another rank has failed. Never blocks.
  void look_around();
  /// The process of `peer` is gone. Throws what it said before, or that it said nothing.
  [[noreturn]] void lose(int peer);
  /// Of all waits from now on.
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }
  Milliseconds timeout() const { return timeout_; }
  /// What this rank is doing, in words, for those that ask. Called on its own thread.
  void describe_by(std::function<std::string()> doing) { doing_ = std::move(doing); }
  /// Called in every wait.
  void do_beside(std::function<void()> move) { beside_ = std::move(move); }
  /// Waits until is_done(); where(seconds), a CommError::Where, says for what. Throws HangError after the time-out.
  template <class IsDone, class WhereOf>
  void wait_until(const IsDone& is_done, const WhereOf& where);

  /// As Transport::abort and end_in_order.
  bool abort(std::string_view message) noexcept;
  void end_in_order() noexcept;
  /// No failure will come any more.
  void close() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  struct AskedStack {
    int rank;
    int asker;
    StackQuestion question;
  };

  std::string doing() const;
  void tell(int peer, Notice::Kind kind, int rank, const std::string& text);
  [[noreturn]] void time_out(const CommError::Where& where);
  void ask_all();
  void ask_for_stacks();
  void ask_for_stack(int rank, int asker);
  std::optional<int> witness_of(int rank) const;
  void look_for_stacks();
  std::optional<Notice> next_failure();
  void look_for_notice();
  void look_for_lost_peers();
  void answer_termination();
  [[noreturn]] void fail(std::exception_ptr failure);
  [[noreturn]] void fail_without(const std::string& lost);
  Notice make_notice(Notice::Kind kind, int rank, std::string_view text) const;
  void spread(const Notice& notice) noexcept;
  bool is_my_turn_to_end() const;
  void wait_for_my_turn();
  void abort_from_own_thread(std::string_view message) noexcept;
  void abort_from_other_thread(std::string_view message) noexcept;

  NoticeCarrier& carrier_;
  int rank_;
  int size_;
  bool has_own_core_;
  Milliseconds timeout_;
  std::function<std::string()> doing_;
  std::function<void()> beside_;
  const std::function<CommError::Where()>* wait_ = nullptr;  // that this rank is in
  std::thread::id own_thread_ = std::this_thread::get_id();
  uint32_t num_looks_ = 0;

  std::exception_ptr failure_;
  std::atomic<bool> is_failure_of_peer_ = false;  // helper threads read it in abort()
  int culprit_ = -1;                              // the other rank that has failed, unless it is gone
  std::vector<bool> is_quiet_;                    // by rank
  Notice outgoing_notice_;
  Notice quiet_notice_;
  bool has_spread_ = false;
  Notice question_;
  std::deque<Notice> told_;                         // to single ranks; a notice stays as it is
  std::vector<std::optional<std::string>> heard_;   // answers of others, by rank
  std::vector<std::optional<std::string>> stacks_;  // of those that do not answer, by rank; a line for each function
  std::deque<AskedStack> asked_stacks_;
  int first_asker_ = std::numeric_limits<int>::max();  // the lowest rank that has asked
  PeerProcesses peers_;
  std::optional<TerminationWatch> termination_watch_;
  Clock::time_point last_liveness_check_ = Clock::now();
  Clock::time_point termination_noticed_;

  // An abort that another thread of this process asks the rank's own thread to spread.
  std::atomic<bool> has_foreign_abort_ = false;
  std::atomic<bool> has_spread_foreign_abort_ = false;
  std::string foreign_abort_;
};

template <class IsDone, class WhereOf>
void WorldWatch::wait_until(const IsDone& is_done, const WhereOf& where) {
  if (is_done()) return;
  Backoff backoff(has_own_core_);
  const std::function<CommError::Where()> now = [&] {
    return where(std::chrono::duration<double>(backoff.elapsed()).count());
  };
  struct Waiting {
    WorldWatch* watch;
    ~Waiting() { watch->wait_ = nullptr; }
  } const waiting{this};
  wait_ = &now;
  WaitLimit limit;
  do {
    backoff.pause();
    if (limit.is_over(backoff.elapsed(), timeout_)) time_out(now());
    if (beside_) beside_();
  } while (!is_done());
}

}  // namespace smp::runtime
