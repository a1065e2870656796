// Owns how a failure reaches the other ranks of an MPI world, and how this rank learns of theirs.
#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/transport/mpi_engine.h"

namespace smp::runtime::mpi {
namespace {

constexpr int kNoticeTag = 0;  // on a communicator of its own
constexpr auto kLivenessInterval = std::chrono::milliseconds(200);
// What a peer said before it died is on its way for at most this long.
constexpr auto kNoticeGrace = std::chrono::milliseconds(50);
// mpirun sends SIGKILL 0.9 s after its SIGTERM; what has to be said must be said before.
constexpr auto kTerminationGrace = std::chrono::milliseconds(300);
// For those that compute, and hear of a failure late or never.
constexpr auto kAbortLimit = std::chrono::milliseconds(1000);
// Longer than the rank waits whose turn comes first.
constexpr auto kPeerAbortLimit = std::chrono::milliseconds(2000);

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
    end_in_order();
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

void Engine::post_notice_receive() {
  mpi_check(MPI_Irecv(&incoming_notice_, sizeof(Notice), MPI_BYTE, MPI_ANY_SOURCE, kNoticeTag, notices_, &notice_request_),
            "MPI_Irecv of notices");
}

// A failure that has come; who is quiet is only noted.
std::optional<Engine::Notice> Engine::poll_notice() {
  for (;;) {
    int has_come = 0;
    mpi_check(MPI_Test(&notice_request_, &has_come, MPI_STATUS_IGNORE), "look for a notice");
    if (has_come == 0) [[likely]]
      return std::nullopt;
    const Notice notice = incoming_notice_;
    post_notice_receive();
    if (notice.kind != Notice::Kind::kQuiet) return notice;
    is_quiet_[static_cast<size_t>(notice.rank)] = true;
  }
}

void Engine::look_for_notice() {
  const std::optional<Notice> notice = poll_notice();
  if (!notice) [[likely]]
    return;
  is_failure_of_peer_ = true;
  const std::string text(notice->text, static_cast<size_t>(notice->num_chars));
  if (notice->kind == Notice::Kind::kPeerLost) fail(std::make_exception_ptr(PeerLostError(text)));
  culprit_ = notice->rank;
  fail(std::make_exception_ptr(AbortedError(notice->rank, text)));
}

void Engine::look_for_lost_peers() {
  const std::optional<int> lost = peers_->first_lost();
  if (!lost) return;
  // It may have said why, or another rank that it was killed, before they went.
  for (const auto start = Clock::now(); Clock::now() - start < kNoticeGrace; sleep_for_a_moment()) look_for_notice();
  is_failure_of_peer_ = true;
  const std::string text = peers_->name_of(*lost) + " was killed or ended without a word";
  spread(make_notice(Notice::Kind::kPeerLost, *lost, text));
  fail(std::make_exception_ptr(PeerLostError(text)));
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
  if (std::exchange(has_spread_, true)) return;
  outgoing_notice_ = notice;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) send_notice(outgoing_notice_, peer);
  drive_notices();
}

// `notice` must stay as it is.
void Engine::send_notice(const Notice& notice, int peer) noexcept {
  const int num_bytes = static_cast<int>(offsetof(Notice, text)) + notice.num_chars;
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Isend(&notice, num_bytes, MPI_BYTE, peer, kNoticeTag, notices_, &request);
  if (code == MPI_SUCCESS) outgoing_.push_back(request);
}

// Are all on their way?
bool Engine::drive_notices() noexcept {
  bool are_all_done = true;
  for (MPI_Request& request : outgoing_) {
    int is_done = 1;
    if (request != MPI_REQUEST_NULL) MPI_Test(&request, &is_done, MPI_STATUS_IGNORE);
    are_all_done = are_all_done && is_done != 0;
  }
  return are_all_done;
}

bool Engine::abort(std::string_view message) noexcept {
  if (is_failure_of_peer_) return false;  // they know
  if (size_ == 1) return true;
  if (std::this_thread::get_id() == own_thread_)
    abort_from_own_thread(message);
  else
    abort_from_other_thread(message);
  return true;
}

void Engine::abort_from_own_thread(std::string_view message) noexcept {
  if (!failure_) failure_ = std::make_exception_ptr(AbortedError(rank_, std::string(message)));
  spread(make_notice(Notice::Kind::kAborted, rank_, message));
  const auto start = Clock::now();
  while (!drive_notices() && Clock::now() - start < kAbortLimit) sleep_for_a_moment();
}

// Another thread's failure is in order once the rank's own thread has spread it.
void Engine::end_in_order() noexcept {
  if (size_ == 1 || std::this_thread::get_id() != own_thread_) return;
  try {
    wait_for_my_turn();
  } catch (const CommError&) {
    return;  // MPI has failed: nobody can be waited for
  }
}

void Engine::wait_for_my_turn() {
  quiet_notice_ = make_notice(Notice::Kind::kQuiet, rank_, "");
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && (culprit_ < 0 || peer == culprit_)) send_notice(quiet_notice_, peer);
  const auto start = Clock::now();
  auto terminated = Clock::time_point::max();
  while (!is_my_turn_to_end()) {
    drive_notices();
    poll_notice();  // who fails now too becomes quiet as well
    const auto now = Clock::now();
    if (is_termination_requested() && terminated == Clock::time_point::max()) terminated = now;
    if (now - start > (culprit_ < 0 ? kAbortLimit : kPeerAbortLimit)) return;
    if (terminated < now && now - terminated > kTerminationGrace) return;
    sleep_for_a_moment();
  }
}

bool Engine::is_my_turn_to_end() const {
  if (culprit_ >= 0) return !peers_->is_rank_running(culprit_);
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && !is_quiet_[static_cast<size_t>(peer)] && peers_->is_rank_running(peer)) return false;
  return true;
}

void Engine::abort_from_other_thread(std::string_view message) noexcept {
  foreign_abort_ = message;
  has_foreign_abort_.store(true, std::memory_order_release);
  const auto start = Clock::now();
  while (!has_spread_foreign_abort_.load() && Clock::now() - start < kPeerAbortLimit) sleep_for_a_moment();
}

}  // namespace smp::runtime::mpi
