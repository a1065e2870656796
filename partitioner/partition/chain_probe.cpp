// Bounds of the borders from the last stage to the first, then the reachable borders stage by stage.
#include "partitioner/partition/chain_probe.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

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

bool ChainProbe::may_reach(double limit_us) {
  const auto& prefix = chain_.prefix_us;
  int border = earliest_[num_stages_] = chain_.num_blocks();
  for (int stage = num_stages_ - 1; stage >= 0; --stage) {
    double end_us = kInfinity;  // the least that an end from `border` on adds to a stage
    for (int end = border; end <= latest_border(stage + 1) && chain_.work_until_us(stage, end) < end_us; ++end) {
      end_us = std::min(end_us, chain_.work_until_us(stage, end) + chain_.messages.ending_us(end));
    }
    const auto is_too_early = [&](double us) { return end_us - chain_.work_us(stage, us) > limit_us; };
    const auto first = std::partition_point(prefix.begin(), prefix.begin() + border, is_too_early);
    int begin = std::max(stage, static_cast<int>(first - prefix.begin()));
    const auto is_too_slow = [&](int at) {
      return end_us - chain_.work_until_us(stage, at) + chain_.messages.beginning_us(at) > limit_us;
    };
    while (begin <= latest_border(stage) && is_too_slow(begin)) ++begin;
    if (begin > latest_border(stage)) return false;
    border = earliest_[stage] = begin;
  }
  return border == 0;
}

void ChainProbe::take_begins(int stage, Aim aim) {
  std::vector<StageBegins::Begin> begins;
  begins.reserve(reached_.size() - stage_begin_);
  index_of_border_.clear();
  for (size_t i = stage_begin_; i < reached_.size(); ++i) {
    index_of_border_.resize(static_cast<size_t>(reached_[i].border - reached_[stage_begin_].border) + 1, begins.size());
    begins.push_back({-chain_.work_until_us(stage, reached_[i].border), reached_[i].aim_us});
  }
  index_of_border_.push_back(begins.size());
  begins_.reset(aim, std::move(begins));
}

void ChainProbe::take_in(int block, int first_begin) {
  const auto index_of = [&](int border) {
    const int last = static_cast<int>(index_of_border_.size()) - 1;
    return index_of_border_[static_cast<size_t>(std::clamp(border - first_begin, 0, last))];
  };
  for (const auto& change : chain_.messages.changes(block)) {
    begins_.add(index_of(change.first), index_of(change.last + 1), change.us);
  }
}

bool ChainProbe::sweep(int stage, Aim aim, double limit_us) {
  take_begins(stage, aim);
  const size_t from = stage_begin_, from_end = reached_.size();
  stage_begin_ = from_end;
  const int first_begin = reached_[from].border, last_begin = reached_[from_end - 1].border;
  const double last_begin_us = chain_.work_until_us(stage, last_begin);
  BeginWindow window(chain_, stage, first_begin);
  size_t head = from, next = from;  // reached_[head, next) may be begins
  int block = first_begin;
  const int last_end = latest_border(stage + 1);
  for (int end = std::max(earliest_[stage + 1], first_begin + 1); end <= last_end; ++end) {
    const double end_us = chain_.work_until_us(stage, end);
    if (end > last_begin && end_us - last_begin_us > limit_us) break;
    for (; block < end; ++block) take_in(block, first_begin);
    while (next < from_end && reached_[next].border < end) ++next;
    const int earliest_begin = window.earliest_begin(end);
    while (head < next && reached_[head].border < earliest_begin) ++head;
    if (const auto best = begins_.find(head - from, next - from, end_us, limit_us)) {
      reached_.push_back({end, from + best->index, best->aim_us});
    }
  }
  return reached_.size() > from_end;
}

void ChainProbe::backtrack() {
  cuts_.assign(num_stages_ + 1, 0);
  size_t index = reached_.size() - 1;
  for (int stage = num_stages_ - 1; stage >= 0; --stage) {
    cuts_[stage + 1] = reached_[index].border;
    index = reached_[index].parent;
  }
}

std::optional<double> ChainProbe::least(Aim aim, double limit_us) {
  if (!may_reach(limit_us)) return std::nullopt;
  reached_.assign(1, {});
  stage_begin_ = 0;
  for (int stage = 0; stage < num_stages_; ++stage) {
    if (!sweep(stage, aim, limit_us)) return std::nullopt;
  }
  backtrack();
  return reached_.back().aim_us;
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
