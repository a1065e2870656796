// Owns matching, waiting and deadlock detection of the loopback.
#include "runtime/transport/loopback_hub.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "runtime/transport/error.h"

namespace smp::runtime {
namespace {

using Kind = LoopbackMessage::Kind;
using State = LoopbackMessage::State;
using Clock = std::chrono::steady_clock;

constexpr int kNumYields = 50;  // about as long as a neighbour's small operator takes

std::string text_of(const LoopbackMessage& message) {
  if (message.kind == Kind::kCollective) return message.collective;
  const bool is_send = message.kind == Kind::kSend;
  return (is_send ? "send of " : "receive of at most ") + std::to_string(message.memory.num_bytes) + " bytes with tag " +
         std::to_string(message.tag);
}

std::string text_with_peer(const LoopbackMessage& message) {
  if (message.kind == Kind::kCollective) return message.collective;
  return text_of(message) + (message.kind == Kind::kSend ? " to rank " : " from rank ") + std::to_string(message.peer);
}

CommError::Where where_of(const LoopbackMessage& message, std::string_view action, double seconds) {
  const int peer = message.kind == Kind::kCollective ? -1 : message.peer;
  return {text_of(message), peer, std::string(action), seconds};
}

bool is_pair(const LoopbackMessage& send, const LoopbackMessage& receive) {
  return send.owner == receive.peer && send.peer == receive.owner && send.tag == receive.tag && send.group == receive.group;
}

}  // namespace

LoopbackHub::LoopbackHub(int size) {
  for (int rank = 0; rank < size; ++rank) ranks_.emplace_back();
}

uint32_t LoopbackHub::take_slot(int rank) {
  Rank& mine = rank_at(rank);
  mine.free_slots.insert(mine.free_slots.end(), mine.finished_drops.begin(), mine.finished_drops.end());
  mine.finished_drops.clear();
  if (mine.free_slots.empty()) {
    mine.free_slots.push_back(static_cast<uint32_t>(mine.messages.size()));
    mine.messages.emplace_back();
  }
  const uint32_t slot = mine.free_slots.back();
  mine.free_slots.pop_back();
  LoopbackMessage& message = mine.messages[slot];
  message.state.store(State::kPosted, std::memory_order_relaxed);
  message.is_dropped = false;
  message.moved = nullptr;
  message.owner = rank;
  return slot;
}

uint32_t LoopbackHub::post(int rank, const LoopbackPosted& posted) {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  const uint32_t slot = take_slot(rank);
  LoopbackMessage& message = at({rank, slot});
  static_cast<LoopbackPosted&>(message) = posted;
  if (posted.kind == Kind::kSend)
    match_send(rank, slot);
  else
    match_receive(rank, slot);
  return slot;
}

void LoopbackHub::match_send(int rank, uint32_t slot) {
  const LoopbackMessage& send = at({rank, slot});
  Rank& dest = rank_at(send.peer);
  const auto receive = std::find_if(dest.receives.begin(), dest.receives.end(),
                                    [&](uint32_t candidate) { return is_pair(send, dest.messages[candidate]); });
  if (receive == dest.receives.end()) {
    dest.arrivals.push_back({rank, slot});
    return;
  }
  const Slot matched{send.peer, *receive};
  dest.receives.erase(receive);
  move({rank, slot}, matched);
}

void LoopbackHub::match_receive(int rank, uint32_t slot) {
  const LoopbackMessage& receive = at({rank, slot});
  Rank& mine = rank_at(rank);
  const auto send = std::find_if(mine.arrivals.begin(), mine.arrivals.end(),
                                 [&](Slot candidate) { return is_pair(at(candidate), receive); });
  if (send == mine.arrivals.end()) {
    mine.receives.push_back(slot);
    return;
  }
  const Slot matched = *send;
  mine.arrivals.erase(send);
  move(matched, {rank, slot});
}

void LoopbackHub::move(Slot send_slot, Slot receive_slot) {
  LoopbackMessage& send = at(send_slot);
  LoopbackMessage& receive = at(receive_slot);
  const bool fits = send.memory.num_bytes <= receive.memory.num_bytes;
  const Device& device = device_of(send.memory);
  TORCH_CHECK(&device == &device_of(receive.memory),
              "loopback: expected both ends of a message to be memory of one kind of ", "device, got a ",
              text_with_peer(send), " of memory of ", send.memory.device, " and a ", text_with_peer(receive),
              " into memory of ", receive.memory.device);
  device.go_on_behind(send.reached);
  device.go_on_behind(receive.reached);
  device.copy(receive.memory.data, send.memory.data, std::min(send.memory.num_bytes, receive.memory.num_bytes));
  send.moved = receive.moved = device.record();
  send.moved_bytes = receive.moved_bytes = send.memory.num_bytes;
  finish(send_slot, State::kDone);
  finish(receive_slot, fits ? State::kDone : State::kTruncated);
}

void LoopbackHub::finish(Slot slot, State state) {
  Rank& owner = rank_at(slot.rank);
  LoopbackMessage& message = at(slot);
  if (message.is_dropped) owner.finished_drops.push_back(slot.slot);
  message.state.store(state, std::memory_order_release);
  if (owner.waits_for == slot.slot) {
    owner.waits_for.reset();
    owner.wake.notify_one();
  }
}

uint32_t LoopbackHub::meet(int rank, uint32_t group, const std::vector<int>& members, std::string name, void* contribution,
                           const Combine& combine) {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  const uint32_t slot = take_slot(rank);
  LoopbackMessage& message = at({rank, slot});
  message.kind = Kind::kCollective;
  message.collective = std::move(name);
  message.moved_bytes = 0;

  Meeting& meeting = meetings_[group];
  meeting.slots.resize(members.size());
  meeting.contributions.resize(members.size());
  const auto index = std::find(members.begin(), members.end(), rank) - members.begin();
  meeting.slots[static_cast<size_t>(index)] = {rank, slot};
  meeting.contributions[static_cast<size_t>(index)] = contribution;
  if (++meeting.num_arrived < static_cast<int>(members.size())) return slot;

  const Meeting complete = std::move(meeting);
  meetings_.erase(group);
  check_meeting(complete);
  combine(complete.contributions);
  for (const Slot member : complete.slots) finish(member, State::kDone);
  return slot;
}

void LoopbackHub::check_meeting(const Meeting& meeting) {
  const std::string& first = at(meeting.slots.front()).collective;
  for (const Slot member : meeting.slots) {
    const std::string& other = at(member).collective;
    if (other == first) continue;
    fail("collectives differ: rank " + std::to_string(meeting.slots.front().rank) + " calls " + first + ", rank " +
         std::to_string(member.rank) + " calls " + other +
         ". All members of a group must call the same collectives in the same order.");
    throw_if_failed();
  }
}

bool LoopbackHub::test(int rank, uint32_t slot, int64_t* num_bytes) {
  // The rank's own thread alone adds to `messages`, so it may look without the lock.
  const State state = rank_at(rank).messages[slot].state.load(std::memory_order_acquire);
  if (state == State::kPosted) {
    throw_if_failed();
    return false;
  }
  *num_bytes = take_result(rank, slot, {});
  return true;
}

int64_t LoopbackHub::wait(int rank, uint32_t slot, std::string_view action, Milliseconds timeout) {
  const auto start = Clock::now();
  Rank& mine = rank_at(rank);
  const auto& state = mine.messages[slot].state;
  for (int i = 0; i < kNumYields && state.load(std::memory_order_acquire) == State::kPosted; ++i) std::this_thread::yield();
  std::unique_lock lock(mutex_);
  if (state.load() == State::kPosted) {
    mine.waits_for = slot;
    mine.action = action;
    check_deadlock();
    const bool is_over =
        mine.wake.wait_until(lock, start + timeout, [&] { return !mine.waits_for.has_value() || has_failed_.load(); });
    mine.waits_for.reset();
    if (!is_over) {
      const std::chrono::duration<double> waited = Clock::now() - start;
      const HangError error(where_of(mine.messages[slot], action, waited.count()).text() + ": timed out", {});
      // Who waits no more may free its buffer, so nothing may move any more.
      fail("rank " + std::to_string(rank) + ": " + error.what());
      throw error;
    }
  }
  lock.unlock();
  if (state.load() == State::kPosted) throw_if_failed();
  return take_result(rank, slot, action);
}

int64_t LoopbackHub::take_result(int rank, uint32_t slot, std::string_view action) {
  Rank& mine = rank_at(rank);
  LoopbackMessage& message = mine.messages[slot];
  if (message.moved) device_of(message.memory).go_on_behind(std::exchange(message.moved, nullptr));
  if (message.state.load(std::memory_order_relaxed) == State::kTruncated)
    throw CommError(where_of(message, action, 0), "truncated: expected at most " + std::to_string(message.memory.num_bytes) +
                                                      " bytes, got " + std::to_string(message.moved_bytes));
  mine.free_slots.push_back(slot);
  return message.moved_bytes;
}

void LoopbackHub::drop(int rank, uint32_t slot) noexcept {
  const std::lock_guard lock(mutex_);
  Rank& mine = rank_at(rank);
  LoopbackMessage& message = mine.messages[slot];
  if (message.state.load() == State::kPosted)
    message.is_dropped = true;
  else
    mine.finished_drops.push_back(slot);
}

uint32_t LoopbackHub::group_id(int rank, uint32_t parent, const std::vector<int>& members) {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  const int nth_call = num_group_calls_[{rank, parent, members}]++;
  const auto next_id = static_cast<uint32_t>(group_ids_.size() + 1);  // 0 is the world
  return group_ids_.try_emplace({parent, members, nth_call}, next_id).first->second;
}

bool LoopbackHub::abort(int rank, std::string_view message) {
  const std::lock_guard lock(mutex_);
  if (has_failed_) return aborted_by_ == rank;
  aborted_by_ = rank;
  fail(std::string(message));
  return true;
}

void LoopbackHub::fail(std::string text) {
  if (has_failed_) return;
  failure_ = std::move(text);
  has_failed_.store(true, std::memory_order_release);
  for (Rank& rank : ranks_) rank.wake.notify_one();
}

void LoopbackHub::throw_if_failed() const {
  if (!has_failed_.load(std::memory_order_acquire)) [[likely]]
    return;
  if (aborted_by_ >= 0) throw AbortedError(aborted_by_, failure_);
  throw CommError(failure_);
}

void LoopbackHub::leave(int rank) {
  const std::lock_guard lock(mutex_);
  rank_at(rank).has_left = true;
  check_deadlock();
}

void LoopbackHub::check_deadlock() {
  bool anyone_waits = false;
  for (const Rank& rank : ranks_) {
    if (!rank.has_left && !rank.waits_for.has_value()) return;
    anyone_waits = anyone_waits || !rank.has_left;
  }
  if (anyone_waits) fail("deadlock, every rank waits and nothing is under way:" + waiting_text());
}

std::string LoopbackHub::waiting_text() {
  std::string text;
  int number = 0;
  for (const Rank& rank : ranks_) {
    text += "\n  rank " + std::to_string(number++);
    if (rank.has_left) {
      text += " has left";
      continue;
    }
    text += " waits for " + text_with_peer(rank.messages[*rank.waits_for]);
    if (!rank.action.empty()) text += ", action " + rank.action;
  }
  return text;
}

void LoopbackHub::close() {
  const std::lock_guard lock(mutex_);
  if (has_failed_) return;
  std::string text;
  for (Rank& rank : ranks_) {
    for (const Slot send : rank.arrivals)
      text += "\n  rank " + std::to_string(send.rank) + ": " + text_with_peer(at(send)) + " was never received";
    for (const uint32_t receive : rank.receives)
      text += "\n  rank " + std::to_string(rank.messages[receive].owner) + ": " + text_with_peer(rank.messages[receive]) +
              " was never sent";
  }
  if (!text.empty()) throw CommError("messages left over at the end:" + text);
}

}  // namespace smp::runtime
