// Reduce-scatter, then all-gather, both direct; between them each rank sums its part.
#include "runtime/transport/running_sum.h"

#include "runtime/device/device.h"
#include "runtime/transport/abandoned.h"
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

RunningSum::Part RunningSum::part(int rank) const {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(type_));
  const int64_t first = num_elements_ * rank / group_->size(), end = num_elements_ * (rank + 1) / group_->size();
  return {static_cast<char*>(data_.get()) + first * element_bytes, end - first, (end - first) * element_bytes};
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
    requests_.push_back(group_->irecv(other, tag_, received_from(other), mine.num_bytes));
  }
  for (int step = 1; step < size; ++step) {
    const int other = (me + step) % size;
    const Part theirs = part(other);
    requests_.push_back(group_->isend(other, tag_, theirs.data, theirs.num_bytes));
  }
}

void RunningSum::start_spread() {
  const int me = group_->rank(), size = group_->size();
  const Part mine = part(me);
  for (int step = 1; step < size; ++step) {
    const int other = (me + step) % size;
    const Part theirs = part(other);
    requests_.push_back(group_->irecv(other, tag_ + 1, theirs.data, theirs.num_bytes));
    requests_.push_back(group_->isend(other, tag_ + 1, mine.data, mine.num_bytes));
  }
}

void RunningSum::finish_hop() {
  requests_.clear();
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
  if (part_done_) part_done_(num_elements_ * group_->rank() / group_->size(), mine.num_elements);
  hop_ = Hop::kSpread;
  start_spread();
}

bool RunningSum::advance() {
  while (hop_ != Hop::kDone) {
    while (!requests_.empty() && requests_.back().test()) requests_.pop_back();
    if (!requests_.empty()) return false;
    finish_hop();
  }
  return true;
}

void RunningSum::wait(std::string_view action) {
  while (hop_ != Hop::kDone) {
    for (Request& request : requests_) request.wait(action);
    finish_hop();
  }
}

}  // namespace smp::runtime
