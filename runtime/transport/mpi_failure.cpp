// Owns how a failure reaches the other ranks of an MPI world, and how this rank learns of theirs.
#include <algorithm>
#include <cstring>

#include "runtime/transport/mpi_engine.h"

namespace smp::runtime::mpi {
namespace {

constexpr auto kLivenessInterval = std::chrono::milliseconds(200);
// What a peer said before it died is on its way for at most this long.
constexpr auto kNoticeGrace = std::chrono::milliseconds(50);
// mpirun sends SIGKILL 0.9 s after its SIGTERM; what has to be said must be said before.
constexpr auto kTerminationGrace = std::chrono::milliseconds(300);
constexpr auto kAbortLimit = std::chrono::milliseconds(1000);

void sleep_for_a_moment() {
  const timespec moment{0, 1'000'000};
  nanosleep(&moment, nullptr);
}

}  // namespace

void Engine::look_around() {
  if (size_ == 1) return finish_dropped();
  look_for_notice();
  if (has_foreign_abort_.load(std::memory_order_acquire)) [[unlikely]] {
    abort_from_own_thread(foreign_abort_);
    has_spread_foreign_abort_.store(true);
    throw_if_failed();
  }
  if (!dropped_slots_.empty()) finish_dropped();
  if (is_termination_requested()) [[unlikely]]
    answer_termination();
  if (++num_looks_around_ % 16 != 0) return;
  const auto now = Clock::now();
  if (now - last_liveness_check_ < kLivenessInterval) return;
  last_liveness_check_ = now;
  look_for_lost_peers();
}

void Engine::look_for_notice() {
  int has_come = 0;
  mpi_check(MPI_Test(&notice_request_, &has_come, MPI_STATUS_IGNORE), "look for a notice");
  if (has_come == 0) [[likely]]
    return;
  is_failure_of_peer_ = true;
  const Notice& notice = incoming_notice_;
  const std::string text(notice.text, static_cast<size_t>(notice.num_chars));
  if (notice.kind == Notice::Kind::kPeerLost)
    fail(std::make_exception_ptr(PeerLostError(notice.rank, text)));
  fail(std::make_exception_ptr(AbortedError(notice.rank, text)));
}

void Engine::look_for_lost_peers() {
  const std::optional<int> lost = peers_->first_lost();
  if (!lost) return;
  // It may have said why, or another rank that it was killed, before they went.
  for (const auto start = Clock::now(); Clock::now() - start < kNoticeGrace; sleep_for_a_moment())
    look_for_notice();
  is_failure_of_peer_ = true;
  const std::string text = peers_->name_of(*lost) + " was killed or ended without a word";
  spread(make_notice(Notice::Kind::kPeerLost, *lost, text));
  fail(std::make_exception_ptr(PeerLostError(*lost, text)));
}

void Engine::answer_termination() {
  look_for_lost_peers();
  const auto now = Clock::now();
  if (termination_noticed_ == Clock::time_point()) termination_noticed_ = now;
  if (now - termination_noticed_ < kTerminationGrace) return;
  fail(std::make_exception_ptr(CommError("ended by SIGTERM while all ranks were alive")));
}

void Engine::fail(std::exception_ptr failure) {
  failure_ = std::move(failure);
  // Their buffers may go while the failure unwinds the callers.
  for (Slot& slot : slots_)
    if (slot.is_receive && slot.request != MPI_REQUEST_NULL) MPI_Cancel(&slot.request);
  std::rethrow_exception(failure_);
}

Engine::Notice Engine::make_notice(Notice::Kind kind, int rank, std::string_view text) const {
  Notice notice;
  notice.kind = kind;
  notice.rank = rank;
  notice.num_chars = static_cast<int32_t>(std::min(text.size(), sizeof(notice.text)));
  std::memcpy(notice.text, text.data(), static_cast<size_t>(notice.num_chars));
  return notice;
}

void Engine::spread(const Notice& notice) noexcept {
  if (!outgoing_.empty()) return;
  outgoing_notice_ = notice;
  const int num_bytes = static_cast<int>(offsetof(Notice, text)) + notice.num_chars;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    const int code =
        MPI_Isend(&outgoing_notice_, num_bytes, MPI_BYTE, peer, kNoticeTag, notices_, &request);
    if (code == MPI_SUCCESS) outgoing_.push_back(request);
  }
  drive_notices();
}

void Engine::drive_notices() noexcept {
  for (MPI_Request& request : outgoing_) {
    int is_done = 0;
    if (request != MPI_REQUEST_NULL) MPI_Test(&request, &is_done, MPI_STATUS_IGNORE);
  }
}

void Engine::abort(std::string_view message) noexcept {
  if (size_ == 1 || is_failure_of_peer_) return;  // they know
  if (std::this_thread::get_id() == own_thread_)
    abort_from_own_thread(message);
  else
    abort_from_other_thread(message);
}

void Engine::abort_from_own_thread(std::string_view message) noexcept {
  if (!failure_) failure_ = std::make_exception_ptr(AbortedError(rank_, std::string(message)));
  spread(make_notice(Notice::Kind::kAborted, rank_, message));
  // Until they have gone, so that what this rank prints comes last.
  const auto start = Clock::now();
  auto terminated = Clock::time_point::max();
  while (!peers_->are_all_local_gone()) {
    drive_notices();
    int has_failed_too = 0;
    MPI_Test(&notice_request_, &has_failed_too, MPI_STATUS_IGNORE);
    if (has_failed_too != 0) return;  // it will not go before this rank does
    const auto now = Clock::now();
    if (is_termination_requested() && terminated == Clock::time_point::max()) terminated = now;
    if (now - start > kAbortLimit) return;
    if (terminated < now && now - terminated > kTerminationGrace) return;
    sleep_for_a_moment();
  }
}

void Engine::abort_from_other_thread(std::string_view message) noexcept {
  foreign_abort_ = message;
  has_foreign_abort_.store(true, std::memory_order_release);
  const auto start = Clock::now();
  while (!has_spread_foreign_abort_.load() && Clock::now() - start < kAbortLimit)
    sleep_for_a_moment();
}

}  // namespace smp::runtime::mpi
