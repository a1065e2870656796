// Reduce-scatter in place, then everybody reads.
#include "runtime/transport/shared_sum.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/transport/checks.h"

namespace smp::runtime {

// What this rank has written is there before the others hear of it, and what they have written when it has heard.
void SharedSum::tell(Hop next) {
  std::atomic_thread_fence(std::memory_order_release);
  for (int step = 1; step < group_.size(); ++step) {
    const int other = (group_.rank() + step) % group_.size();
    requests_.push_back(group_.irecv(other, tag_, nullptr, 0));
    requests_.push_back(group_.isend(other, tag_, nullptr, 0));
  }
  hop_ = next;
}

bool SharedSum::all_told() {
  while (!requests_.empty() && requests_.back().test()) requests_.pop_back();
  return requests_.empty();
}

void SharedSum::wait_for_all(std::string_view action) {
  for (Request& request : requests_) request.wait(action);
  requests_.clear();
}

void SharedSum::finish_hop() {
  std::atomic_thread_fence(std::memory_order_acquire);
  if (hop_ == Hop::kParts) {
    hop_ = Hop::kSummed;
    return;
  }
  const int me = group_.rank();
  const int64_t first = first_of(me), count = first_of(me + 1) - first;
  const int64_t first_byte = first * static_cast<int64_t>(c10::elementSize(type_));
  std::vector<const void*> terms;
  for (int rank = 0; rank < group_.size(); ++rank) terms.push_back(memory_->of(rank) + first_byte);
  host().sum_in_order(terms, own() + first_byte, count, type_);
  if (part_done_) part_done_(first, count);
  tell(Hop::kParts);
}

bool SharedSum::is_free() {
  if (hop_ == Hop::kReads && all_told()) hop_ = Hop::kFree;
  return hop_ == Hop::kFree;
}

void SharedSum::wait_until_free(std::string_view action) {
  if (hop_ != Hop::kReads) return;
  wait_for_all(action);
  hop_ = Hop::kFree;
}

void SharedSum::start(int64_t num_elements, c10::ScalarType type, PartDone part_done) {
  TORCH_INTERNAL_ASSERT(hop_ == Hop::kFree, "a shared sum starts before everybody has read the last one");
  TORCH_INTERNAL_ASSERT(num_elements * static_cast<int64_t>(c10::elementSize(type)) <= num_bytes());
  num_elements_ = num_elements;
  type_ = type;
  part_done_ = std::move(part_done);
  tell(Hop::kTerms);
}

bool SharedSum::advance() {
  while (hop_ == Hop::kTerms || hop_ == Hop::kParts) {
    if (!all_told()) return false;
    finish_hop();
  }
  return true;
}

void SharedSum::wait(std::string_view action) {
  while (hop_ == Hop::kTerms || hop_ == Hop::kParts) {
    wait_for_all(action);
    finish_hop();
  }
}

void SharedSum::read(int64_t first_byte, const DeviceMemory& to) const {
  check_host_memory("shared sum", to);
  TORCH_INTERNAL_ASSERT(hop_ == Hop::kSummed, "a shared sum is read before it is there");
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(type_));
  auto* next = static_cast<char*>(to.data);
  for (int rank = 0; rank < group_.size(); ++rank) {
    const int64_t begin = std::max(first_byte, first_of(rank) * element_bytes);
    const int64_t end = std::min(first_byte + to.num_bytes, first_of(rank + 1) * element_bytes);
    if (begin >= end) continue;
    std::memcpy(next, memory_->of(rank) + begin, static_cast<size_t>(end - begin));
    next += end - begin;
  }
}

void SharedSum::release() {
  part_done_ = {};
  tell(Hop::kReads);
}

}  // namespace smp::runtime
