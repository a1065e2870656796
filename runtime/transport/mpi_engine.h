// Owns what all groups of one MPI rank share: messages under way, and waiting for them. Internal to the MPI transport, and
// the one place that includes <mpi.h>.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/transport/error.h"
#include "runtime/transport/transport.h"
#include "runtime/transport/world_watch.h"

namespace smp::runtime::mpi {

/// Throws the CommError of a failed MPI call.
[[noreturn]] void throw_mpi_error(int code, const CommError::Where& where);
/// Throws CommError unless code is MPI_SUCCESS.
inline void mpi_check(int code, const char* operation) {
  if (code != MPI_SUCCESS) [[unlikely]]
    throw_mpi_error(code, {.operation = operation});
}

/// One rank's end of the world. Nothing moves unless this rank calls: MPI has no thread of its own here.
class Engine final : public RequestPool, private NoticeCarrier {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Collective over MPI_COMM_WORLD, which must be initialised.
  /// timeout: of every wait.
  explicit Engine(Milliseconds timeout);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int world_rank() const { return watch_->rank(); }
  int world_size() const { return watch_->size(); }
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
  /// What fails in this world.
  WorldWatch& watch() { return *watch_; }
  /// No message will come any more, nor any failure. Collective in effect: call it after a barrier.
  void close() noexcept;

 private:
  struct Slot {
    MPI_Request request = MPI_REQUEST_NULL;
    bool is_receive = false;
    int peer = 0;  // world rank
    int tag = 0;
    int64_t num_bytes = 0;  // a receive: at most
  };
  uint32_t take_slot();
  Slot& at(uint32_t slot) { return slots_[slot]; }
  bool look(uint32_t slot, int64_t* num_bytes, std::string_view action);
  [[noreturn]] void throw_message_error(const Slot& message, int code, const MPI_Status& status,
                                        std::string_view action) const;
  CommError::Where where_of(const Slot& message, std::string_view action, double seconds) const;
  void look_around();
  void finish_dropped();

  void send_notice(const Notice& notice, int peer) noexcept override;
  bool drive_notices() noexcept override;
  std::optional<Notice> receive_notice() override;
  void give_up_messages() noexcept override;
  void post_notice_receive();

  MPI_Comm world_ = MPI_COMM_NULL;
  MPI_Comm control_ = MPI_COMM_NULL;
  MPI_Comm notices_ = MPI_COMM_NULL;

  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> dropped_slots_;
  uint32_t num_looks_ = 0;

  std::optional<WorldWatch> watch_;
  MPI_Request notice_request_ = MPI_REQUEST_NULL;
  Notice incoming_notice_;
  std::vector<MPI_Request> outgoing_;
};

}  // namespace smp::runtime::mpi
