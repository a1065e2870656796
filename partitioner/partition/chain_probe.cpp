// The probe of the parametric search: reachable borders stage by stage.
#include "partitioner/partition/chain_probe.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace smp::partitioner {

BeginWindow::BeginWindow(const BlockChain& chain, int stage, int first_begin)
    : chain_(chain), limits_(chain.stages[stage]), stage_(stage), begin_(first_begin), pins_seen_(first_begin) {}

bool BeginWindow::fits(int end) const {
  const int64_t fixed = chain_.prefix_fixed_bytes[end] - chain_.prefix_fixed_bytes[begin_];
  const int64_t activation = chain_.prefix_activation_bytes[end] - chain_.prefix_activation_bytes[begin_];
  return fixed + limits_.in_flight * activation <= limits_.memory_bytes;
}

int BeginWindow::earliest_begin(int end) {
  if (!chain_.first_stage.empty()) {
    for (; pins_seen_ < end; ++pins_seen_) {
      const bool allowed = chain_.first_stage[pins_seen_] <= stage_ && stage_ <= chain_.last_stage[pins_seen_];
      if (!allowed) begin_ = std::max(begin_, pins_seen_ + 1);
    }
  }
  if (limits_.memory_bytes >= 0) {
    while (begin_ < end && !fits(end)) ++begin_;
  }
  return begin_;
}

ChainProbe::ChainProbe(const BlockChain& chain, int num_stages)
    : chain_(chain), num_stages_(num_stages), earliest_(num_stages + 1) {
  TORCH_INTERNAL_ASSERT(num_stages >= 1 && num_stages <= chain.num_blocks());
}

int ChainProbe::latest_border(int stage_count) const { return chain_.num_blocks() - (num_stages_ - stage_count); }

void ChainProbe::find_earliest_borders(double limit_us) {
  int border = chain_.num_blocks();
  earliest_[num_stages_] = border;
  const auto& prefix = chain_.prefix_us;
  for (int stage = num_stages_ - 1; stage >= 0; --stage) {
    const double end_us = chain_.work_until_us(stage, border);
    auto too_early = [&](double us) { return end_us - chain_.work_us(stage, us) > limit_us; };
    const int begin =
        static_cast<int>(std::partition_point(prefix.begin(), prefix.begin() + border, too_early) - prefix.begin());
    if (begin > 0) {
      next_candidate_us_ = std::min(next_candidate_us_, end_us - chain_.work_until_us(stage, begin - 1));
    }
    border = begin;
    earliest_[stage] = std::max(begin, stage);
  }
}

/// `block` changes what stages cost that begin at reached_[from, from_end).
void ChainProbe::take_in(int block, size_t from, size_t from_end) {
  const auto first = reached_.begin() + static_cast<std::ptrdiff_t>(from);
  const auto end = reached_.begin() + static_cast<std::ptrdiff_t>(from_end);
  const auto before = [](const Reached& reached, int border) { return reached.border < border; };
  for (const auto& change : chain_.messages.changes(block)) {
    const bool covers_first = change.first <= first->border;
    const bool covers_last = change.last >= (end - 1)->border;
    const auto from_begin = covers_first ? first : std::lower_bound(first, end, change.first, before);
    const auto to_begin = covers_last ? end : std::lower_bound(first, end, change.last + 1, before);
    begins_.add(static_cast<size_t>(from_begin - first), static_cast<size_t>(to_begin - first), change.us);
  }
}

bool ChainProbe::sweep(int stage, double limit_us) {
  const size_t from = stage_begin_, from_end = reached_.size();
  stage_begin_ = from_end;
  const int first_begin = reached_[from].border, last_begin = reached_[from_end - 1].border;
  leaves_.clear();
  for (size_t i = from; i < from_end; ++i) {
    leaves_.push_back({-chain_.work_until_us(stage, reached_[i].border), reached_[i].traffic_us});
  }
  begins_.reset(leaves_);
  BeginWindow window(chain_, stage, first_begin);
  size_t head = from, next = from;  // reached_[head, next) may be begins
  int block = first_begin;
  const int last_end = latest_border(stage + 1);
  for (int end = std::max(earliest_[stage + 1], first_begin + 1); end <= last_end; ++end) {
    for (; block < end; ++block) take_in(block, from, from_end);
    while (next < from_end && reached_[next].border < end) ++next;
    const int earliest_begin = window.earliest_begin(end);
    while (head < next && reached_[head].border < earliest_begin) ++head;
    if (head == next) {
      if (end > last_begin) break;
      continue;
    }
    const double end_us = chain_.work_until_us(stage, end);
    double least_us = kInfinity;
    if (const auto best = begins_.find(head - from, next - from, end_us, limit_us, least_us)) {
      reached_.push_back({end, from + best->index, best->begin.us, best->begin.traffic_us});
      continue;
    }
    const double without_messages_us = end_us - chain_.work_until_us(stage, last_begin);
    const bool all_later_fail = end > last_begin && without_messages_us > limit_us;
    next_candidate_us_ = std::min(next_candidate_us_, all_later_fail ? without_messages_us : least_us);
    if (all_later_fail) break;
  }
  return reached_.size() > from_end;
}

void ChainProbe::backtrack() {
  cuts_.assign(num_stages_ + 1, 0);
  slowest_us_ = 0;
  size_t index = reached_.size() - 1;
  for (int stage = num_stages_ - 1; stage >= 0; --stage) {
    const Reached& end = reached_[index];
    cuts_[stage + 1] = end.border;
    slowest_us_ = std::max(slowest_us_, end.us);
    index = end.parent;
  }
}

bool ChainProbe::reaches(double limit_us) {
  next_candidate_us_ = kInfinity;
  find_earliest_borders(limit_us);
  if (earliest_[0] > 0) return false;
  reached_.assign(1, {});
  stage_begin_ = 0;
  for (int stage = 0; stage < num_stages_; ++stage) {
    if (!sweep(stage, limit_us)) return false;
  }
  backtrack();
  return true;
}

int largest_feasible_stage_count(const BlockChain& chain) {
  const int num_blocks = chain.num_blocks();
  const int num_stages = std::min(static_cast<int>(chain.stages.size()), num_blocks);
  std::vector<char> reached(num_blocks + 1, 0), next(num_blocks + 1);
  reached[0] = 1;
  int largest = 0;
  for (int stage = 0; stage < num_stages; ++stage) {
    std::fill(next.begin(), next.end(), 0);
    BeginWindow window(chain, stage, 0);
    int latest_reached = -1;  // the latest reached border before `end`
    for (int end = 1; end <= num_blocks; ++end) {
      if (reached[end - 1]) latest_reached = end - 1;
      next[end] = latest_reached >= window.earliest_begin(end) ? 1 : 0;
    }
    if (next[num_blocks]) largest = stage + 1;
    std::swap(reached, next);
  }
  return largest;
}

}  // namespace smp::partitioner
