// Two hops, between which each rank sums its part. And the sum that is waited for at once.
#include "runtime/transport/running_sum.h"

#include <algorithm>

#include "runtime/device/device.h"
#include "runtime/transport/abandoned.h"
#include "runtime/transport/checks.h"
#include "runtime/transport/error.h"
#include "runtime/transport/sum.h"

namespace smp::runtime {

RunningSum::RunningSum(Transport& group, int tag, const DeviceMemory& terms, const std::shared_ptr<void>& holder,
                       c10::ScalarType type, PartDone part_done)
    : group_(&group),
      tag_(tag),
      data_(holder, terms.data),
      num_elements_(check_sum(terms, type)),
      type_(type),
      part_done_(std::move(part_done)) {
  start_gather();
}

RunningSum::~RunningSum() {
  if (data_ == nullptr || hop_ == Hop::kDone) return;
  abandon(data_);
  abandon(received_);
}

// What `rank` sums.
RunningSum::Part RunningSum::part(int rank) const {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(type_));
  const int64_t first = num_elements_ * rank / group_->size(), end = num_elements_ * (rank + 1) / group_->size();
  return {first, static_cast<char*>(data_.get()) + first * element_bytes, end - first, (end - first) * element_bytes};
}

char* RunningSum::received_from(int rank) const {
  return static_cast<char*>(received_.get()) + rank * part(group_->rank()).num_bytes;
}

void RunningSum::start_gather() {
  const int me = group_->rank(), size = group_->size();
  const Part mine = part(me);
  const auto owner = std::make_shared<c10::DataPtr>(host().allocate(mine.num_bytes * size));
  received_ = {owner, owner->get()};
  for (int step = 1; step < size; ++step) {  // not all to rank 0 first
    const int other = (me + step) % size;
    messages_.push_back({group_->irecv(other, tag_, received_from(other), mine.num_bytes), mine.num_bytes});
  }
  for (int step = 1; step < size; ++step) {
    const int other = (me + step) % size;
    const Part theirs = part(other);
    messages_.push_back({group_->isend(other, tag_, theirs.data, theirs.num_bytes), theirs.num_bytes});
  }
}

void RunningSum::start_spread() {
  const int me = group_->rank(), size = group_->size();
  const Part mine = part(me);
  for (int step = 1; step < size; ++step) {
    const int other = (me + step) % size;
    const Part theirs = part(other);
    messages_.push_back({group_->irecv(other, tag_ + 1, theirs.data, theirs.num_bytes), theirs.num_bytes});
    messages_.push_back({group_->isend(other, tag_ + 1, mine.data, mine.num_bytes), mine.num_bytes});
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
    terms.push_back(rank == group_->rank() ? mine.data : received_from(rank));
  }
  sum_in_order(terms, mine.data, mine.num_elements, type_);
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
  check_ranks_memory("all_reduce_sum", terms);
  if (const Device& device = device_of(terms); device.type != host().type) {
    const auto on_host = std::make_shared<const c10::DataPtr>(host().allocate(terms.num_bytes));
    device.copy(on_host->get(), terms.data, terms.num_bytes);
    keeping(on_host, [&] { all_reduce_sum({on_host->get(), terms.num_bytes}, type); });
    return device.copy(terms.data, on_host->get(), terms.num_bytes);
  }
  const std::string action = "all_reduce_sum of " + std::to_string(check_sum(terms, type)) + " " + c10::toString(type);
  if (size() == 1) return progress();
  // A rank's share of what is summed at a time, and what the others send for it, should stay in the cache.
  const int64_t most_bytes = size() * (int64_t{256} << 10);
  int64_t first = 0;
  do {
    const DeviceMemory some{static_cast<char*>(terms.data) + first, std::min(most_bytes, terms.num_bytes - first),
                            terms.device};
    RunningSum(*this, kSumTag, some, nullptr, type).wait(action);
    first += most_bytes;
  } while (first < terms.num_bytes);
}

}  // namespace smp::runtime
