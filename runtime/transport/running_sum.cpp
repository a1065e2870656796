// Two hops, between which each rank sums its part. And the sum that is waited for at once.
#include "runtime/transport/running_sum.h"

#include <algorithm>

#include "runtime/device/device.h"
#include "runtime/transport/abandoned.h"
#include "runtime/transport/checks.h"
#include "runtime/transport/error.h"

namespace smp::runtime {

RunningSum::RunningSum(Transport& group, int tag, const DeviceMemory& terms, const std::shared_ptr<void>& holder,
                       c10::ScalarType type, PartDone part_done)
    : group_(&group),
      tag_(tag),
      data_(holder, terms.data),
      num_elements_(check_sum(group, terms, type)),
      device_(&device_of(terms)),
      type_(type),
      part_done_(std::move(part_done)) {
  try {
    start_gather();
  } catch (...) {
    if (!messages_.empty()) abandon_memory();  // they go on
    throw;
  }
}

RunningSum::~RunningSum() {
  if (data_ != nullptr && hop_ != Hop::kDone) abandon_memory();
}

void RunningSum::abandon_memory() const {
  abandon(data_);
  abandon(received_);
}

// What `rank` sums.
RunningSum::Part RunningSum::part(int rank) const {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(type_));
  const int64_t first = num_elements_ * rank / group_->size(), end = num_elements_ * (rank + 1) / group_->size();
  void* const data = static_cast<char*>(data_.get()) + first * element_bytes;
  return {first, end - first, {data, (end - first) * element_bytes, device_->type}};
}

DeviceMemory RunningSum::received_from(int rank) const {
  const int64_t num_bytes = part(group_->rank()).memory.num_bytes;
  return {static_cast<char*>(received_.get()) + rank * num_bytes, num_bytes, device_->type};
}

void RunningSum::receive(int from, int tag, const DeviceMemory& into) {
  messages_.push_back({group_->irecv(from, tag, into), into.num_bytes});
}

void RunningSum::send(int to, int tag, const DeviceMemory& memory) {
  messages_.push_back({group_->isend(to, tag, memory), memory.num_bytes});
}

void RunningSum::start_gather() {
  const int me = group_->rank(), size = group_->size();
  const auto owner = std::make_shared<c10::DataPtr>(device_->allocate(part(me).memory.num_bytes * size));
  received_ = {owner, owner->get()};
  for (int step = 1; step < size; ++step) {  // not all to rank 0 first
    const int other = (me + step) % size;
    receive(other, tag_, received_from(other));
  }
  for (int step = 1; step < size; ++step) {
    const int other = (me + step) % size;
    send(other, tag_, part(other).memory);
  }
}

void RunningSum::start_spread() {
  const int me = group_->rank(), size = group_->size();
  for (int step = 1; step < size; ++step) {
    const int other = (me + step) % size;
    receive(other, tag_ + 1, part(other).memory);
    send(other, tag_ + 1, part(me).memory);
  }
}

void RunningSum::finish_hop() {
  messages_.clear();
  if (hop_ == Hop::kSpread) {
    hop_ = Hop::kDone;
    return;
  }
  const Part mine = part(group_->rank());
  std::vector<const void*> terms;
  for (int rank = 0; rank < group_->size(); ++rank) {
    terms.push_back(rank == group_->rank() ? mine.memory.data : received_from(rank).data);
  }
  device_->sum_in_order(terms, mine.memory.data, mine.num_elements, type_);
  if (part_done_) part_done_(mine.first, mine.num_elements);
  hop_ = Hop::kSpread;
  start_spread();
}

void RunningSum::check_length(Message& done, std::string_view action) {
  const int64_t num_bytes = done.request.wait(action);
  if (num_bytes == done.num_bytes) return;
  throw CommError({.operation = "sum over ranks", .action = std::string(action)},
                  "expected as many elements on every rank, a message of " + std::to_string(done.num_bytes) +
                      " bytes, got one of " + std::to_string(num_bytes) + ". Give tensors of one size on all ranks.");
}

bool RunningSum::advance() {
  while (hop_ != Hop::kDone) {
    for (; !messages_.empty() && messages_.back().request.test(); messages_.pop_back()) check_length(messages_.back(), {});
    if (!messages_.empty()) return false;
    finish_hop();
  }
  return true;
}

void RunningSum::wait(std::string_view action) {
  while (hop_ != Hop::kDone) {
    for (Message& message : messages_) check_length(message, action);
    finish_hop();
  }
}

void Transport::all_reduce_sum(const DeviceMemory& terms, c10::ScalarType type) {
  const std::string action =
      "all_reduce_sum of " + std::to_string(check_sum(*this, terms, type)) + " " + c10::toString(type);
  if (size() == 1) return progress();
  // A rank's share of what is summed at a time, and what the others send for it, should stay in the host's cache.
  const int64_t most_bytes = terms.device == host().type ? size() * (int64_t{256} << 10) : int64_t{64} << 20;
  int64_t first = 0;
  do {
    const DeviceMemory some{static_cast<char*>(terms.data) + first, std::min(most_bytes, terms.num_bytes - first),
                            terms.device};
    RunningSum(*this, kSumTag, some, nullptr, type).wait(action);
    first += most_bytes;
  } while (first < terms.num_bytes);
}

}  // namespace smp::runtime
