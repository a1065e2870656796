// Owns the inline progress of MPI: messages, and notices of failure.
#include "runtime/transport/mpi_engine.h"

#include <c10/util/Exception.h>

#include <climits>

namespace smp::runtime::mpi {
namespace {

constexpr int kNoticeTag = 0;  // on a communicator of its own
// A look at the failures of others costs as much as one at a message, so not every one is worth it.
constexpr uint32_t kLooksPerLookAround = 32;

int num_ranks_of_host(MPI_Comm world) {
  MPI_Comm host = MPI_COMM_NULL;
  mpi_check(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), "split by host");
  int num_ranks = 1;
  mpi_check(MPI_Comm_size(host, &num_ranks), "size of host");
  mpi_check(MPI_Comm_free(&host), "free of host group");
  return num_ranks;
}

MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  mpi_check(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  mpi_check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

void check_tags(MPI_Comm world) {
  int* largest = nullptr;
  int is_known = 0;
  mpi_check(MPI_Comm_get_attr(world, MPI_TAG_UB, static_cast<void*>(&largest), &is_known), "MPI_TAG_UB");
  if (is_known != 0 && *largest < kMaxTag)
    throw CommError("mpi transport: expected an MPI with tags up to " + std::to_string(kMaxTag) +
                    ", got one with tags up to " + std::to_string(*largest) +
                    " (MPI_TAG_UB). Choose another transport of it.");
}

std::vector<std::string> gather_identities(MPI_Comm comm, int size) {
  constexpr int kMaxChars = 512;
  std::string mine = this_process().serialised();
  mine.resize(kMaxChars);
  std::string all(static_cast<size_t>(kMaxChars) * static_cast<size_t>(size), '\0');
  mpi_check(MPI_Allgather(mine.data(), kMaxChars, MPI_CHAR, all.data(), kMaxChars, MPI_CHAR, comm),
            "exchange of process identities");
  std::vector<std::string> identities;
  for (size_t start = 0; start < all.size(); start += kMaxChars) identities.emplace_back(all.c_str() + start);
  return identities;
}

// MPI counts in int.
int to_mpi_count(int64_t count, const char* operation) {
  TORCH_CHECK_VALUE(count <= INT_MAX, operation, ": expected at most ", INT_MAX, " bytes in one message of MPI, got ", count,
                    ". More microbatches make the tensors between stages smaller.");
  return static_cast<int>(count);
}

}  // namespace

void throw_mpi_error(int code, const CommError::Where& where) {
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommError(where, std::string("MPI failed: ") + text);
}

Engine::Engine(Milliseconds timeout) {
  // Open MPI reports errors of non-blocking collectives there, and would end the process on the spot.
  mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_tags(MPI_COMM_WORLD);
  world_ = duplicate(MPI_COMM_WORLD);
  control_ = duplicate(world_);
  notices_ = duplicate(world_);
  int rank = 0, size = 1;
  mpi_check(MPI_Comm_rank(world_, &rank), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(world_, &size), "MPI_Comm_size");
  NoticeCarrier& carrier = *this;
  watch_.emplace(carrier, rank, gather_identities(world_, size), num_ranks_of_host(world_), timeout);
  if (size > 1) post_notice_receive();
}

Engine::~Engine() {
  close();
  // Communicators are left to MPI_Finalize: freeing them is collective, and a destructor is not.
}

void Engine::close() noexcept {
  watch_->close();
  int is_finalized = 0;
  MPI_Finalized(&is_finalized);
  if (is_finalized != 0 || notice_request_ == MPI_REQUEST_NULL) return;
  MPI_Cancel(&notice_request_);
  MPI_Request_free(&notice_request_);
}

uint32_t Engine::take_slot() {
  watch_->throw_if_failed();
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

Request Engine::isend(MPI_Comm comm, int peer, int world_peer, int tag, const void* data, int64_t num_bytes) {
  const int count = to_mpi_count(num_bytes, "isend");
  const uint32_t slot = take_slot();
  at(slot) = {MPI_REQUEST_NULL, false, world_peer, tag, num_bytes};
  mpi_check(MPI_Isend(data, count, MPI_BYTE, peer, tag, comm, &at(slot).request), "isend");
  return {*this, slot};
}

Request Engine::irecv(MPI_Comm comm, int peer, int world_peer, int tag, void* data, int64_t max_bytes) {
  const int count = to_mpi_count(max_bytes, "irecv");
  const uint32_t slot = take_slot();
  at(slot) = {MPI_REQUEST_NULL, true, world_peer, tag, max_bytes};
  mpi_check(MPI_Irecv(data, count, MPI_BYTE, peer, tag, comm, &at(slot).request), "irecv");
  return {*this, slot};
}

bool Engine::test(uint32_t slot, int64_t* num_bytes) { return look(slot, num_bytes, {}); }

bool Engine::look(uint32_t slot, int64_t* num_bytes, std::string_view action) {
  watch_->throw_if_failed();
  Slot& message = at(slot);
  int is_done = 0;
  MPI_Status status;
  const int code = MPI_Test(&message.request, &is_done, &status);
  if (code != MPI_SUCCESS) [[unlikely]]
    throw_message_error(message, code, status, action);
  if (is_done == 0) {
    if (++num_looks_ % kLooksPerLookAround == 0) look_around();
    return false;
  }
  *num_bytes = message.num_bytes;
  if (message.is_receive) {
    int count = 0;
    mpi_check(MPI_Get_count(&status, MPI_BYTE, &count), "length of a message");
    *num_bytes = count;
  }
  free_slots_.push_back(slot);
  return true;
}

void Engine::throw_message_error(const Slot& message, int code, const MPI_Status& status, std::string_view action) const {
  int error_class = MPI_SUCCESS;
  MPI_Error_class(code, &error_class);
  if (error_class != MPI_ERR_TRUNCATE) throw_mpi_error(code, where_of(message, action, 0));
  int count = 0;
  MPI_Get_count(&status, MPI_BYTE, &count);
  throw CommError(where_of(message, action, 0), "truncated: expected at most " + std::to_string(message.num_bytes) +
                                                    " bytes, got " + std::to_string(count));
}

CommError::Where Engine::where_of(const Slot& message, std::string_view action, double seconds) const {
  const std::string operation = (message.is_receive ? "receive of at most " : "send of ") +
                                std::to_string(message.num_bytes) + " bytes with tag " + std::to_string(message.tag);
  return {operation, message.peer, std::string(action), seconds};
}

int64_t Engine::wait(uint32_t slot, std::string_view action) {
  int64_t num_bytes = 0;
  watch_->wait_until([&] { return look(slot, &num_bytes, action); },
                     [&](double seconds) { return where_of(at(slot), action, seconds); });
  return num_bytes;
}

void Engine::wait(MPI_Request request, const std::string& operation) {
  const auto is_done = [&] {
    watch_->throw_if_failed();
    int done = 0;
    const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) throw_mpi_error(code, {.operation = operation});
    if (done == 0 && ++num_looks_ % kLooksPerLookAround == 0) look_around();
    return done != 0;
  };
  const auto where = [&](double seconds) { return CommError::Where{.operation = operation, .seconds = seconds}; };
  watch_->wait_until(is_done, where);
}

void Engine::drop(uint32_t slot) noexcept {
  Slot& message = at(slot);
  if (message.request == MPI_REQUEST_NULL) {  // it has failed
    free_slots_.push_back(slot);
    return;
  }
  dropped_slots_.push_back(slot);
}

void Engine::finish_dropped() {
  std::erase_if(dropped_slots_, [&](uint32_t slot) {
    int is_done = 0;
    mpi_check(MPI_Test(&at(slot).request, &is_done, MPI_STATUS_IGNORE), "end of a dropped message");
    if (is_done != 0) free_slots_.push_back(slot);
    return is_done != 0;
  });
}

void Engine::look_around() {
  watch_->look_around();
  if (!dropped_slots_.empty()) finish_dropped();
}

void Engine::progress() { look_around(); }

void Engine::send_notice(const Notice& notice, int peer) noexcept {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Isend(&notice, notice.num_bytes(), MPI_BYTE, peer, kNoticeTag, notices_, &request);
  if (code == MPI_SUCCESS) outgoing_.push_back(request);
}

bool Engine::drive_notices() noexcept {
  bool are_all_done = true;
  for (MPI_Request& request : outgoing_) {
    int is_done = 1;
    if (request != MPI_REQUEST_NULL) MPI_Test(&request, &is_done, MPI_STATUS_IGNORE);
    are_all_done = are_all_done && is_done != 0;
  }
  return are_all_done;
}

void Engine::post_notice_receive() {
  mpi_check(MPI_Irecv(&incoming_notice_, sizeof(Notice), MPI_BYTE, MPI_ANY_SOURCE, kNoticeTag, notices_, &notice_request_),
            "MPI_Irecv of notices");
}

std::optional<Notice> Engine::receive_notice() {
  int has_come = 0;
  mpi_check(MPI_Test(&notice_request_, &has_come, MPI_STATUS_IGNORE), "look for a notice");
  if (has_come == 0) [[likely]]
    return std::nullopt;
  const Notice notice = incoming_notice_;
  post_notice_receive();
  return notice;
}

void Engine::give_up_messages() noexcept {
  for (Slot& slot : slots_)
    if (slot.is_receive && slot.request != MPI_REQUEST_NULL) MPI_Cancel(&slot.request);
}

}  // namespace smp::runtime::mpi
