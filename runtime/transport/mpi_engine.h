// Owns what all groups of one MPI rank share: messages under way, waiting, and how a failure
// spreads. Internal to the MPI transport, and the one place that includes <mpi.h>.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "runtime/transport/backoff.h"
#include "runtime/transport/error.h"
#include "runtime/transport/transport.h"
#include "runtime/watch/peer_processes.h"
#include "runtime/watch/termination.h"

namespace smp::runtime::mpi {

/// Throws the CommError of a failed MPI call.
[[noreturn]] void throw_mpi_error(int code, const CommError::Where& where);
/// Throws CommError unless code is MPI_SUCCESS.
inline void mpi_check(int code, const char* operation) {
  if (code != MPI_SUCCESS) [[unlikely]]
    throw_mpi_error(code, {.operation = operation});
}

/// One rank's end of the world. Nothing moves unless this rank calls: MPI has no thread of its own here.
///
/// A rank that fails sends the others a Notice; they look for it while they wait or call
/// progress(). Who is killed sends nothing, so while they look they also see, every 0.2 s or at
/// once after mpirun's SIGTERM, whether the processes of their host are alive.
class Engine final : public RequestPool {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Collective over MPI_COMM_WORLD, which must be initialised.
  /// timeout: of every wait.
  explicit Engine(Milliseconds timeout);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int world_rank() const { return rank_; }
  int world_size() const { return size_; }
  MPI_Comm world() const { return world_; }
  /// For the agreements between ranks that come before a group exists.
  MPI_Comm control() const { return control_; }

  /// peer: its rank in `comm`; world_peer: in errors.
  Request isend(MPI_Comm comm, int peer, int world_peer, int tag, const void* data, int64_t num_bytes);
  Request irecv(MPI_Comm comm, int peer, int world_peer, int tag, void* data, int64_t max_bytes);
  bool test(uint32_t slot, int64_t* num_bytes) override;
  int64_t wait(uint32_t slot, std::string_view action) override;
  void drop(uint32_t slot) noexcept override;

  /// Waits for a request that has no slot, a collective's.
  void wait(MPI_Request request, const std::string& operation);
  void progress();
  bool abort(std::string_view message) noexcept;
  void end_in_order() noexcept;
  /// Throws what has failed before, if anything has.
  void throw_if_failed() const {
    if (failure_) [[unlikely]]
      std::rethrow_exception(failure_);
  }
  bool has_failed() const { return failure_ != nullptr; }
  /// No message will come any more, nor any failure. Collective in effect: call it after a barrier.
  void close() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Slot {
    MPI_Request request = MPI_REQUEST_NULL;
    bool is_receive = false;
    int peer = 0;  // world rank
    int tag = 0;
    int64_t num_bytes = 0;  // a receive: at most
  };
  // What a failing rank tells the others.
  struct Notice {
    enum class Kind : int32_t { kAborted, kPeerLost, kQuiet };
    Kind kind = Kind::kAborted;
    int32_t rank = 0;  // that failed, died, or has printed all but its last line
    int32_t num_chars = 0;
    char text[4000];
  };

  uint32_t take_slot();
  Slot& at(uint32_t slot) { return slots_[slot]; }
  bool look(uint32_t slot, int64_t* num_bytes, std::string_view action);
  [[noreturn]] void throw_message_error(const Slot& message, int code, const MPI_Status& status,
                                        std::string_view action) const;
  CommError::Where where_of(const Slot& message, std::string_view action, double seconds) const;
  template <class IsDone, class WhereOf>
  void wait_until(const IsDone& is_done, const WhereOf& where);
  void finish_dropped();

  // mpi_failure.cpp
  void look_around();
  void post_notice_receive();
  std::optional<Notice> poll_notice();
  void look_for_notice();
  void look_for_lost_peers();
  void answer_termination();
  [[noreturn]] void fail(std::exception_ptr failure);
  Notice make_notice(Notice::Kind kind, int rank, std::string_view text) const;
  void spread(const Notice& notice) noexcept;
  void send_notice(const Notice& notice, int peer) noexcept;
  bool drive_notices() noexcept;
  bool is_my_turn_to_end() const;
  void wait_for_my_turn();
  void abort_from_own_thread(std::string_view message) noexcept;
  void abort_from_other_thread(std::string_view message) noexcept;

  Milliseconds timeout_;
  MPI_Comm world_ = MPI_COMM_NULL;
  MPI_Comm control_ = MPI_COMM_NULL;
  MPI_Comm notices_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  bool has_own_core_ = true;
  std::thread::id own_thread_ = std::this_thread::get_id();

  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> dropped_slots_;
  uint32_t num_looks_ = 0;
  uint32_t num_looks_around_ = 0;

  std::exception_ptr failure_;
  std::atomic<bool> is_failure_of_peer_ = false;  // helper threads read it in abort()
  int culprit_ = -1;                              // the other rank that has failed, unless it is gone
  std::vector<bool> is_quiet_;                    // by rank
  MPI_Request notice_request_ = MPI_REQUEST_NULL;
  Notice incoming_notice_;
  Notice outgoing_notice_;
  Notice quiet_notice_;
  bool has_spread_ = false;
  std::vector<MPI_Request> outgoing_;
  std::optional<PeerProcesses> peers_;
  std::optional<TerminationWatch> termination_watch_;
  Clock::time_point last_liveness_check_ = Clock::now();
  Clock::time_point termination_noticed_;

  // An abort that another thread of this process asks the rank's own thread to spread.
  std::atomic<bool> has_foreign_abort_ = false;
  std::atomic<bool> has_spread_foreign_abort_ = false;
  std::string foreign_abort_;
};

}  // namespace smp::runtime::mpi
