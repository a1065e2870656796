// Owns the inline progress of messages over sockets: matching, waiting, and the end of connections.
#include "runtime/transport/socket_engine.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace smp::runtime::sockets {
namespace {

// A look at the failures of others costs as much as one at messages, so not every one is worth it.
constexpr uint32_t kLooksPerLookAround = 32;
constexpr int kMaxEvents = 64;
constexpr auto kLeaveLimit = std::chrono::milliseconds(1000);
constexpr int kFailureTag = 0, kLeftTag = 1;  // of notices

Descriptor make_events() {
  Descriptor events(epoll_create1(EPOLL_CLOEXEC));
  if (events.number() < 0) throw CommError(std::string("socket transport: epoll_create1 failed: ") + strerror(errno));
  return events;
}

void listen_to(const Descriptor& events, const SocketLink& link, int peer) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = static_cast<uint32_t>(peer);
  if (epoll_ctl(events.number(), EPOLL_CTL_ADD, link.descriptor(), &event) != 0)
    throw CommError(std::string("socket transport: epoll_ctl failed: ") + strerror(errno));
}

void forget(const Descriptor& events, const SocketLink& link) {
  epoll_ctl(events.number(), EPOLL_CTL_DEL, link.descriptor(), nullptr);
}

// Calls fn(peer) for each peer whose connection has something to read.
template <class Fn>
void for_each_readable(const Descriptor& events, const Fn& fn) {
  epoll_event ready[kMaxEvents];
  const int num_ready = epoll_wait(events.number(), ready, kMaxEvents, 0);
  for (int i = 0; i < num_ready; ++i) fn(static_cast<int>(ready[i].data.u32));
}

}  // namespace

Engine::Engine(Meeting meeting, std::chrono::milliseconds timeout)
    : message_events_(make_events()),
      notice_events_(make_events()),
      watch_(*this, meeting.rank, meeting.identities, meeting.num_local_ranks, timeout) {
  for (int peer = 0; peer < world_size(); ++peer) {
    Messages& messages = messages_.emplace_back(*this);
    Notices& notices = notices_.emplace_back(*this);
    if (peer == world_rank()) continue;
    messages.link = std::make_unique<SocketLink>(std::move(meeting.messages[static_cast<size_t>(peer)]), messages);
    notices.link = std::make_unique<SocketLink>(std::move(meeting.notices[static_cast<size_t>(peer)]), notices);
    listen_to(message_events_, *messages.link, peer);
    listen_to(notice_events_, *notices.link, peer);
  }
}

Engine::~Engine() { watch_.close(); }

uint32_t Engine::take_slot(const Slot& message) {
  watch_.throw_if_failed();
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  at(slot) = message;
  return slot;
}

void Engine::finish(uint32_t slot) {
  at(slot).is_done = true;
  if (at(slot).is_dropped) free_slot(slot);
}

Request Engine::isend(uint64_t channel, int peer, int tag, const void* data, int64_t num_bytes) {
  const uint32_t slot =
      take_slot({.peer = peer, .tag = tag, .channel = channel, .max_bytes = num_bytes, .num_bytes = num_bytes});
  Messages& messages = messages_[static_cast<size_t>(peer)];
  const MessageHeader header{.channel = channel, .num_bytes = num_bytes, .tag = tag};
  if (messages.link) {
    messages.link->send(header, data, slot);
  } else {
    char* const into = messages.begin(header);
    if (into != nullptr && num_bytes > 0) std::memcpy(into, data, static_cast<size_t>(num_bytes));
    messages.end();
    finish(slot);
  }
  return {*this, slot};
}

Request Engine::irecv(uint64_t channel, int peer, int tag, void* data, int64_t max_bytes) {
  const uint32_t slot = take_slot({.is_receive = true,
                                   .peer = peer,
                                   .tag = tag,
                                   .channel = channel,
                                   .data = static_cast<char*>(data),
                                   .max_bytes = max_bytes});
  Messages& messages = messages_[static_cast<size_t>(peer)];
  const auto matching = std::find_if(messages.unexpected.begin(), messages.unexpected.end(),
                                     [&](const Unexpected& message) { return message.header.matches(channel, tag); });
  if (matching == messages.unexpected.end()) {
    messages.posted.push_back(slot);
  } else {
    deliver(*matching, slot);
    messages.unexpected.erase(matching);
  }
  return {*this, slot};
}

void Engine::deliver(const Unexpected& message, uint32_t slot) {
  Slot& receive = at(slot);
  receive.num_bytes = message.header.num_bytes;
  if (receive.num_bytes > 0 && receive.num_bytes <= receive.max_bytes)
    std::memcpy(receive.data, message.bytes.data(), message.bytes.size());
  finish(slot);
}

std::optional<uint32_t> Engine::Messages::take_posted(const MessageHeader& header) {
  const auto matching = std::find_if(posted.begin(), posted.end(), [&](uint32_t slot) {
    return header.matches(engine->at(slot).channel, engine->at(slot).tag);
  });
  if (matching == posted.end()) return std::nullopt;
  const uint32_t slot = *matching;
  posted.erase(matching);
  return slot;
}

char* Engine::Messages::begin(const MessageHeader& header) {
  receiving = take_posted(header);
  if (receiving) {
    Slot& receive = engine->at(*receiving);
    receive.num_bytes = header.num_bytes;
    return header.num_bytes <= receive.max_bytes ? receive.data : nullptr;
  }
  coming = {header, std::string(static_cast<size_t>(header.num_bytes), '\0')};
  return coming.bytes.data();
}

void Engine::Messages::end() {
  if (receiving) return engine->finish(*receiving);
  // It may have been asked for while it came.
  if (const std::optional<uint32_t> slot = take_posted(coming.header))
    engine->deliver(coming, *slot);
  else
    unexpected.push_back(std::move(coming));
}

void Engine::Messages::sent(uint32_t number) { engine->finish(number); }

bool Engine::test(uint32_t slot, int64_t* num_bytes) { return look(slot, num_bytes, {}); }

bool Engine::look(uint32_t slot, int64_t* num_bytes, std::string_view action) {
  watch_.throw_if_failed();
  if (!at(slot).is_done) move();
  const Slot& message = at(slot);
  if (!message.is_done) {
    if (lost_ || ++num_looks_ % kLooksPerLookAround == 0) look_around();
    return false;
  }
  if (message.num_bytes > message.max_bytes) {  // its Request still has the slot, and drops it
    throw CommError(where_of(message, action, 0), "truncated: expected at most " + std::to_string(message.max_bytes) +
                                                      " bytes, got " + std::to_string(message.num_bytes));
  }
  *num_bytes = message.num_bytes;
  free_slot(slot);
  return true;
}

CommError::Where Engine::where_of(const Slot& message, std::string_view action, double seconds) const {
  const std::string operation = (message.is_receive ? "receive of at most " : "send of ") +
                                std::to_string(message.max_bytes) + " bytes with tag " + std::to_string(message.tag);
  return {operation, message.peer, std::string(action), seconds};
}

int64_t Engine::wait(uint32_t slot, std::string_view action) {
  int64_t num_bytes = 0;
  watch_.wait_until([&] { return look(slot, &num_bytes, action); },
                    [&](double seconds) { return where_of(at(slot), action, seconds); });
  return num_bytes;
}

void Engine::drop(uint32_t slot) noexcept {
  if (at(slot).is_done)
    free_slot(slot);
  else
    at(slot).is_dropped = true;
}

void Engine::progress() {
  watch_.throw_if_failed();
  move();
  look_around();
}

void Engine::move() {
  if (has_given_up_) return;
  for (Messages& messages : messages_)
    if (messages.link && messages.link->has_to_write()) messages.link->write();
  for_each_readable(message_events_, [this](int peer) {
    const SocketLink& link = *messages_[static_cast<size_t>(peer)].link;
    if (messages_[static_cast<size_t>(peer)].link->read()) return;
    forget(message_events_, link);
    read_notices(peer);  // it may have said that it leaves
    if (!notices_[static_cast<size_t>(peer)].has_left) lost_ = peer;
  });
}

void Engine::look_around() {
  watch_.look_around();
  if (lost_) watch_.lose(*lost_);
}

char* Engine::Notices::begin(const MessageHeader& header) {
  if (header.num_bytes > static_cast<int64_t>(sizeof coming)) {
    throw CommError("socket transport: expected a notice of at most " + std::to_string(sizeof coming) +
                    " bytes, got one of " + std::to_string(header.num_bytes));
  }
  tag = header.tag;
  return reinterpret_cast<char*>(&coming);
}

void Engine::Notices::end() {
  if (tag == kLeftTag)
    has_left = true;
  else
    engine->come_.push_back(coming);
}

void Engine::read_notices(int peer) {
  Notices& notices = notices_[static_cast<size_t>(peer)];
  if (notices.link->read()) return;
  forget(notice_events_, *notices.link);
  if (!notices.has_left) lost_ = peer;
}

void Engine::send_notice(const Notice& notice, int peer) noexcept {
  notices_[static_cast<size_t>(peer)].link->send({.num_bytes = notice.num_bytes(), .tag = kFailureTag}, &notice, 0);
}

bool Engine::drive_notices() noexcept {
  bool are_all_done = true;
  for (Notices& notices : notices_) {
    if (!notices.link) continue;
    notices.link->write();
    are_all_done = are_all_done && !notices.link->has_to_write();
  }
  return are_all_done;
}

std::optional<Notice> Engine::receive_notice() {
  for_each_readable(notice_events_, [this](int peer) { read_notices(peer); });
  if (come_.empty()) return std::nullopt;
  const Notice notice = come_.front();
  come_.pop_front();
  return notice;
}

void Engine::give_up_messages() noexcept { has_given_up_ = true; }

void Engine::leave() {
  for (Notices& notices : notices_)
    if (notices.link) notices.link->send({.num_bytes = 0, .tag = kLeftTag}, nullptr, 0);
  const auto have_all_left = [this] {
    return std::all_of(notices_.begin(), notices_.end(),
                       [](const Notices& notices) { return !notices.link || notices.has_left; });
  };
  const auto start = std::chrono::steady_clock::now();
  Backoff backoff(/*has_own_core=*/false);
  while ((!drive_notices() || !have_all_left()) && std::chrono::steady_clock::now() - start < kLeaveLimit) {
    receive_notice();
    backoff.pause();
  }
  watch_.close();
}

}  // namespace smp::runtime::sockets
