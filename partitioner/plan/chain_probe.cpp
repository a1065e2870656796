// The probe of the parametric search: reachable borders stage by stage.
#include "partitioner/plan/chain_probe.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>

namespace smp::partitioner {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Minimum over a prefix of ranks, with deletion: a bottom-up segment tree.
class MinTree {
 public:
  struct Entry {
    double traffic_us = kInfinity;
    int border = std::numeric_limits<int>::max();
    auto operator<=>(const Entry&) const = default;
  };

  explicit MinTree(int size) : size_(size), tree_(2 * static_cast<size_t>(size)) {}

  void set(int rank, Entry entry) {
    size_t i = static_cast<size_t>(rank) + size_;
    for (tree_[i] = entry; i > 1; i /= 2) tree_[i / 2] = std::min(tree_[i], tree_[i ^ 1]);
  }

  Entry smallest_below(int rank_end) const {
    Entry best;
    size_t left = size_, right = size_ + static_cast<size_t>(rank_end);
    for (; left < right; left /= 2, right /= 2) {
      if (left & 1) best = std::min(best, tree_[left++]);
      if (right & 1) best = std::min(best, tree_[--right]);
    }
    return best;
  }

 private:
  size_t size_;
  std::vector<Entry> tree_;
};

/// Borders ordered by begin_us: the admissible begins of a stage are then a prefix.
struct BeginOrder {
  std::vector<int> rank_of_border;
  std::vector<double> sorted_begin_us;

  BeginOrder(const BlockChain& chain, int stage) : rank_of_border(chain.prefix_us.size()) {
    std::vector<int> order(rank_of_border.size());
    std::vector<double> begin_us(rank_of_border.size());
    std::iota(order.begin(), order.end(), 0);
    for (int border : order) begin_us[border] = chain.begin_us(stage, border);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return begin_us[a] < begin_us[b]; });
    for (size_t rank = 0; rank < order.size(); ++rank) {
      rank_of_border[order[rank]] = static_cast<int>(rank);
      sorted_begin_us.push_back(begin_us[order[rank]]);
    }
  }

  int count_within(double end_us, double limit_us) const {
    auto fits = [&](double begin_us) { return end_us + begin_us <= limit_us; };
    return static_cast<int>(
        std::partition_point(sorted_begin_us.begin(), sorted_begin_us.end(), fits) -
        sorted_begin_us.begin());
  }
};

}  // namespace

BeginWindow::BeginWindow(const BlockChain& chain, int stage, int first_begin)
    : chain_(chain),
      limits_(chain.stages[stage]),
      stage_(stage),
      begin_(first_begin),
      pins_seen_(first_begin) {}

bool BeginWindow::fits(int end) const {
  const int64_t fixed = chain_.prefix_fixed_bytes[end] - chain_.prefix_fixed_bytes[begin_];
  const int64_t activation =
      chain_.prefix_activation_bytes[end] - chain_.prefix_activation_bytes[begin_];
  return fixed + limits_.in_flight * activation <= limits_.memory_bytes;
}

int BeginWindow::earliest_begin(int end) {
  if (!chain_.first_stage.empty()) {
    for (; pins_seen_ < end; ++pins_seen_) {
      const bool allowed =
          chain_.first_stage[pins_seen_] <= stage_ && stage_ <= chain_.last_stage[pins_seen_];
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

int ChainProbe::latest_border(int stage_count) const {
  return chain_.num_blocks() - (num_stages_ - stage_count);
}

void ChainProbe::find_earliest_borders(double limit_us) {
  int border = chain_.num_blocks();
  earliest_[num_stages_] = border;
  const auto& prefix = chain_.prefix_us;
  for (int stage = num_stages_ - 1; stage >= 0; --stage) {
    const double slowness = chain_.stages[stage].slowness;
    const double end_us = prefix[border] * slowness;
    auto too_early = [&](double begin_us) { return end_us - begin_us * slowness > limit_us; };
    const int begin = static_cast<int>(
        std::partition_point(prefix.begin(), prefix.begin() + border, too_early) - prefix.begin());
    if (begin > 0) {
      next_candidate_us_ = std::min(next_candidate_us_, end_us - prefix[begin - 1] * slowness);
    }
    border = begin;
    earliest_[stage] = std::max(begin, stage);
  }
}

bool ChainProbe::sweep(int stage, double limit_us) {
  const size_t from_end = border_.size();
  size_t next_from = begin_[stage];
  const int first_begin = border_[next_from];
  const int last_begin = border_[from_end - 1];
  BeginWindow window(chain_, stage, first_begin);
  begin_.push_back(from_end);
  window_.clear();
  size_t head = 0;
  const int last_end = latest_border(stage + 1);
  for (int end = std::max(earliest_[stage + 1], first_begin + 1); end <= last_end; ++end) {
    for (; next_from < from_end && border_[next_from] < end; ++next_from) {
      const double begin_us = chain_.begin_us(stage, border_[next_from]);
      while (window_.size() > head && chain_.begin_us(stage, border_[window_.back()]) >= begin_us) {
        window_.pop_back();
      }
      window_.push_back(static_cast<int>(next_from));
    }
    const int earliest_begin = window.earliest_begin(end);
    while (head < window_.size() && border_[window_[head]] < earliest_begin) ++head;
    if (head == window_.size()) {
      if (end > last_begin) break;
      continue;
    }
    const double begin_us = chain_.begin_us(stage, border_[window_[head]]);
    const double us = chain_.end_us(stage, end) + begin_us;
    if (us <= limit_us) {
      border_.push_back(end);
      parent_.push_back(window_[head]);
      continue;
    }
    const double without_send_us = chain_.prefix_us[end] * chain_.stages[stage].slowness + begin_us;
    const bool all_later_fail = end > last_begin && without_send_us > limit_us;
    next_candidate_us_ = std::min(next_candidate_us_, all_later_fail ? without_send_us : us);
    if (all_later_fail) break;
  }
  return border_.size() > from_end;
}

void ChainProbe::backtrack() {
  cuts_.assign(num_stages_ + 1, 0);
  slowest_us_ = 0;
  size_t index = border_.size() - 1;
  for (int stage = num_stages_ - 1; stage >= 0; --stage) {
    const size_t from = static_cast<size_t>(parent_[index]);
    cuts_[stage + 1] = border_[index];
    slowest_us_ = std::max(slowest_us_, chain_.stage_us(stage, border_[from], border_[index]));
    index = from;
  }
}

bool ChainProbe::reaches(double limit_us) {
  next_candidate_us_ = kInfinity;
  find_earliest_borders(limit_us);
  if (earliest_[0] > 0) return false;
  border_.assign(1, 0);
  parent_.assign(1, 0);
  begin_.assign(1, 0);
  for (int stage = 0; stage < num_stages_; ++stage) {
    if (!sweep(stage, limit_us)) return false;
  }
  backtrack();
  return true;
}

std::vector<int> ChainProbe::least_traffic(double limit_us) {
  TORCH_INTERNAL_ASSERT(reaches(limit_us));
  std::optional<BeginOrder> order;
  MinTree tree(chain_.num_blocks() + 1);
  std::vector<double> traffic_us(border_.size(), kInfinity);  // of the stages so far
  traffic_us[0] = 0;
  begin_.push_back(border_.size());
  std::vector<int> index_of_border(chain_.num_blocks() + 1, 0);
  for (int stage = 0; stage < num_stages_; ++stage) {
    const auto& stages = chain_.stages;  // those of one speed share an order
    if (stage == 0 || stages[stage].slowness != stages[stage - 1].slowness) {
      order.emplace(chain_, stage);
    }
    size_t next_from = begin_[stage], oldest = begin_[stage];
    const size_t from_end = begin_[stage + 1];
    BeginWindow window(chain_, stage, border_[next_from]);
    for (size_t i = from_end; i < begin_[stage + 2]; ++i) {
      const int end = border_[i];
      for (; next_from < from_end && border_[next_from] < end; ++next_from) {
        const int border = border_[next_from];
        index_of_border[border] = static_cast<int>(next_from);
        tree.set(order->rank_of_border[border], {traffic_us[next_from], border});
      }
      const int earliest_begin = window.earliest_begin(end);
      for (; oldest < next_from && border_[oldest] < earliest_begin; ++oldest) {
        tree.set(order->rank_of_border[border_[oldest]], {});
      }
      const auto best =
          tree.smallest_below(order->count_within(chain_.end_us(stage, end), limit_us));
      traffic_us[i] = best.traffic_us + chain_.traffic_us[end];
      parent_[i] = index_of_border[best.border];
    }
    for (; oldest < next_from; ++oldest) tree.set(order->rank_of_border[border_[oldest]], {});
  }
  backtrack();
  return cuts_;
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
      next[end] = latest_reached >= window.earliest_begin(end);
    }
    if (next[num_blocks]) largest = stage + 1;
    std::swap(reached, next);
  }
  return largest;
}

}  // namespace smp::partitioner
