// Both ends of a link are given transfers in the order in which the receiver has found their headers.
#include "runtime/transport/link_end.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/transport/abandoned.h"

namespace smp::runtime {
namespace {

constexpr int kGoTag = 0, kGivenTag = 1;  // in a group of their own

}  // namespace

template <class Call>
auto LinkEnd::naming(const Slot& slot, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    failure_ = std::make_exception_ptr(CommError(where_of(slot, {}, 0), error.what()));
    std::rethrow_exception(failure_);
  }
}

LinkEnd::LinkEnd(std::shared_ptr<Transport> world, const DeviceLinks& links, bool links_all)
    : world_(std::move(world)), links_(links), links_all_(links_all) {
  peers_.resize(static_cast<size_t>(world_->size()));
  std::vector<int> all(peers_.size());
  std::iota(all.begin(), all.end(), 0);
  answers_ = world_->group(all);
  world_->do_beside([this] { move(); });
}

// What messages of the host under way are written to and read from stays.
LinkEnd::~LinkEnd() {
  world_->do_beside({});
  for (Slot& slot : slots_) slot.posted = {}, slot.answered = {}, slot.event = {};
  for (Peer& peer : peers_) peer.answer = {}, peer.given = {}, peer.to.link = {}, peer.from.link = {};
  abandon(std::make_shared<std::pair<std::deque<Slot>, std::deque<Peer>>>(std::move(slots_), std::move(peers_)));
}

Request LinkEnd::isend(Transport& group, int dest, int peer, int tag, const DeviceMemory& from) {
  Slot& slot = take(peer, tag, from);
  slot.header = {.number = slot.number, .num_bytes = from.num_bytes};
  slot.posted = group.isend(dest, tag, &slot.header, sizeof slot.header);
  if (from.num_bytes == 0)
    give(slot, {});
  else if (peer != world_->rank())
    ++peers_[static_cast<size_t>(peer)].num_unanswered;
  move();
  return {*this, slot.number};
}

Request LinkEnd::irecv(Transport& group, int source, int peer, int tag, const DeviceMemory& into) {
  Slot& slot = take(peer, tag, into);
  slot.is_receive = true;
  slot.posted = group.irecv(source, tag, &slot.header, sizeof slot.header);
  move();
  return {*this, slot.number};
}

bool LinkEnd::test(uint32_t number, int64_t* num_bytes) {
  move();
  if (!is_done(slots_[number])) {
    world_->progress();
    return false;
  }
  *num_bytes = finish(slots_[number], {});
  return true;
}

int64_t LinkEnd::wait(uint32_t number, std::string_view action) {
  Slot& slot = slots_[number];
  world_->wait_until(
      [&] {
        move();
        return is_done(slot);
      },
      [&](double seconds) { return where_of(slot, action, seconds); });
  return finish(slot, action);
}

void LinkEnd::move() {
  if (failure_) std::rethrow_exception(failure_);
  for (const uint32_t number : under_way_) {
    Slot& slot = slots_[number];
    if (slot.is_receive && slot.state == State::kPosted && slot.posted.test()) find(slot);
  }
  for (size_t peer = 0; peer < peers_.size(); ++peer) hear(static_cast<int>(peer));
  for (size_t i = under_way_.size(); i-- > 0;) {
    Slot& slot = slots_[under_way_[i]];
    if (slot.is_dropped && is_done(slot)) free(slot);
  }
}

void LinkEnd::settle() {
  const auto is_settled = [&] {
    move();
    return std::all_of(under_way_.begin(), under_way_.end(),
                       [&](uint32_t number) { return slots_[number].state == State::kPosted || is_done(slots_[number]); });
  };
  world_->wait_until(is_settled, [](double seconds) {
    return CommError::Where{.operation = "end of messages between devices", .seconds = seconds};
  });
  for (const uint32_t number : under_way_) {
    if (slots_[number].state == State::kGiven) slots_[number].device->go_on_behind(slots_[number].event);
  }
  const Device& device = this_ranks_device();
  device.wait(device.record());
}

LinkEnd::Slot& LinkEnd::take(int peer, int tag, const DeviceMemory& memory) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  Slot& slot = slots_[free_.back()];
  slot = Slot();
  slot.number = free_.back();
  slot.peer = peer, slot.tag = tag;
  slot.memory = memory;
  slot.device = &device_of(memory);
  slot.event = slot.device->record();
  free_.pop_back();
  under_way_.push_back(slot.number);
  return slot;
}

void LinkEnd::free(Slot& slot) {
  std::erase(under_way_, slot.number);
  slot.event.reset();
  free_.push_back(slot.number);
}

// Who sends waits for the device, whose memory may change then.
bool LinkEnd::is_done(Slot& slot) {
  if (slot.state != State::kGiven && slot.state != State::kRefused) return false;
  return slot.posted.test() && slot.answered.test() && (slot.is_receive || slot.device->has_reached(slot.event));
}

// One that is refused stays until it is dropped.
int64_t LinkEnd::finish(Slot& slot, std::string_view action) {
  if (slot.state == State::kRefused) throw CommError(where_of(slot, action, 0), slot.refusal);
  if (slot.is_receive) slot.device->go_on_behind(slot.event);
  free(slot);
  return slot.header.num_bytes;
}

CommError::Where LinkEnd::where_of(const Slot& slot, std::string_view action, double seconds) const {
  const std::string operation = (slot.is_receive ? "receive of at most " : "send of ") +
                                std::to_string(slot.memory.num_bytes) + " bytes with tag " + std::to_string(slot.tag);
  return {operation, slot.peer, std::string(action), seconds};
}

// The header of a receive has come.
void LinkEnd::find(Slot& slot) {
  const int64_t num_bytes = slot.header.num_bytes, room = slot.memory.num_bytes;
  if (slot.posted.wait() != sizeof slot.header || slot.header.magic != Header().magic || num_bytes < 0)
    return refuse(slot, "expected a message of a device's memory, as that of the receive is, got one of the host's");
  if (num_bytes == 0) return give(slot, {});
  const bool fits = num_bytes <= room;
  if (!fits)
    refuse(slot, "truncated: expected at most " + std::to_string(room) + " bytes, got " + std::to_string(num_bytes));
  if (slot.peer == world_->rank()) return copy_own(slot, announced(slot.header.number, slot.peer));
  slot.go = {.number = slot.header.number, .is_refused = !fits};
  Way& way = peers_[static_cast<size_t>(slot.peer)].from;
  if (fits && !way.link) {
    const std::string name = links_.new_name();
    TORCH_INTERNAL_ASSERT(name.size() == slot.go.name.size(), name.size(), " bytes");
    std::copy(name.begin(), name.end(), slot.go.name.begin());
    slot.go.has_name = true;
    connect(way, slot, name, DeviceLinks::End::kReceiver);
  }
  slot.answered = answers_->isend(slot.peer, kGoTag, &slot.go, sizeof slot.go);
  if (fits) start(way, slot, num_bytes);
}

// Of a message of this rank to itself, both are on one device.
void LinkEnd::copy_own(Slot& received, Slot& sent) {
  if (received.state == State::kRefused) return give(sent, {});
  const Device& device = *received.device;
  device.go_on_behind(sent.event);
  device.go_on_behind(received.event);
  device.start_copy(received.memory.data, sent.memory.data, sent.memory.num_bytes);
  give(sent, device.record());
  give(received, sent.event);
}

// Answers that have come from `peer`, and transfers that its links have given to the device.
void LinkEnd::hear(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  while (peer.num_unanswered > 0) {
    if (!peer.is_listening) peer.answer = answers_->irecv(rank, kGoTag, &peer.heard, sizeof peer.heard);
    peer.is_listening = true;
    if (!peer.answer.test()) break;
    peer.is_listening = false;
    --peer.num_unanswered;
    const Go& go = peer.heard;
    Slot& slot = announced(go.number, rank);
    if (go.has_name) connect(peer.to, slot, {go.name.data(), go.name.size()}, DeviceLinks::End::kSender);
    if (go.is_refused)
      give(slot, {});
    else
      start(peer.to, slot, slot.memory.num_bytes);
  }
  look_at_sent(peer.to);
  look_at_received(peer);
}

// The send of which `peer` speaks.
LinkEnd::Slot& LinkEnd::announced(uint32_t number, int peer) {
  const bool is_there = number < slots_.size() && !slots_[number].is_receive && slots_[number].peer == peer &&
                        slots_[number].state == State::kPosted;
  if (!is_there) throw CommError({.operation = "answer to a message", .peer = peer}, "it is of none that was sent");
  return slots_[number];
}

void LinkEnd::connect(Way& way, const Slot& slot, std::string_view name, DeviceLinks::End end) {
  way.link = naming(slot, [&] { return links_.connect(name, end); });
}

void LinkEnd::start(Way& way, Slot& slot, int64_t num_bytes) {
  naming(slot, [&] { way.link->start({slot.memory.data, num_bytes, slot.memory.device}, slot.event); });
  way.started.push_back(slot.number);
  slot.state = State::kStarted;
}

std::optional<Event> LinkEnd::next_given(const Way& way, const Slot& slot) {
  return naming(slot, [&] { return way.link->next_given(); });
}

void LinkEnd::look_at_sent(Way& to) {
  for (; !to.started.empty(); to.started.pop_front()) {
    Slot& slot = slots_[to.started.front()];
    std::optional<Event> end = next_given(to, slot);
    if (!end) return;
    give(slot, *std::move(end));
    slot.answered = answers_->isend(slot.peer, kGivenTag, nullptr, 0);
  }
}

void LinkEnd::look_at_received(Peer& peer) {
  for (; !peer.from.started.empty(); peer.from.started.pop_front()) {
    Slot& slot = slots_[peer.from.started.front()];
    if (slot.state == State::kStarted) {
      std::optional<Event> end = next_given(peer.from, slot);
      if (!end) return;
      slot.event = *std::move(end);
      slot.state = State::kIssued;
    }
    if (!peer.awaits_given) peer.given = answers_->irecv(slot.peer, kGivenTag, nullptr, 0);
    peer.awaits_given = true;
    if (!peer.given.test()) return;
    peer.awaits_given = false;
    slot.state = State::kGiven;
  }
}

void LinkEnd::give(Slot& slot, Event end) {
  slot.event = std::move(end);
  slot.state = State::kGiven;
}
void LinkEnd::refuse(Slot& slot, std::string why) {
  slot.refusal = std::move(why);
  slot.event = {};
  slot.state = State::kRefused;
}

}  // namespace smp::runtime
