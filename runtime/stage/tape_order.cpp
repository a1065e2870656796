// Which calls of a backward may wait.
#include "runtime/stage/tape_order.h"

#include <algorithm>
#include <numeric>
#include <ranges>

#include "runtime/stage/lifetimes.h"

namespace smp::runtime {
namespace {

constexpr size_t kOutputMask = 10;  // of convolution_backward's arguments
constexpr size_t kMostTrials = 8;   // of how many may wait
// Part of the peak that kernels may take beside their results, which is not known: where others wait, they run at a new
// moment.
constexpr int64_t kWorkspaceShare = 8;

bool is_convolution(const TapeCall& call) {
  return call.kind == TapeCall::Kind::kOperator && call.op.operator_name().name == "aten::convolution_backward";
}

class LastBackward {
 public:
  explicit LastBackward(TapeLists& lists)
      : lists_(lists),
        backward_(lists.backwards.back()),
        begin_(lists.backwards.size() == 1 ? lists.forward_end : lists.backwards[lists.backwards.size() - 2].end) {}

  /// Leaves the recorded order where nothing can wait.
  void put_results_first() {
    if (begin_ == lists_.calls.size() || !makes_results()) return;
    const std::vector<TapeCall> recorded(lists_.calls.begin() + static_cast<ptrdiff_t>(begin_), lists_.calls.end());
    split_convolutions();
    find_bytes();
    find_needed();
    if (!order()) {
      lists_.calls.erase(lists_.calls.begin() + static_cast<ptrdiff_t>(begin_), lists_.calls.end());
      lists_.calls.insert(lists_.calls.end(), recorded.begin(), recorded.end());
      backward_.end = lists_.calls.size();
      backward_.results_end = backward_.end;
    }
  }

 private:
  using Order = std::vector<size_t>;  // positions of calls

  bool makes_results() const {
    return std::any_of(backward_.results.begin(), backward_.results.end(), [](int32_t slot) { return slot >= 0; });
  }

  void split_convolutions() {
    std::vector<TapeCall> calls;
    for (size_t n = begin_; n < lists_.calls.size(); ++n) {
      TapeCall& call = lists_.calls[n];
      if (!is_convolution(call) || !asks_for_input_and_others(call)) {
        calls.push_back(std::move(call));
        continue;
      }
      TapeCall input = call, others = std::move(call);
      const c10::List<bool> asked = input.arguments[kOutputMask].toBoolList();
      input.arguments[kOutputMask] = c10::List<bool>({true, false, false});
      others.arguments[kOutputMask] = c10::List<bool>({false, asked[1], asked[2]});
      input.outputs[1] = input.outputs[2] = -1;
      others.outputs[0] = -1;
      calls.push_back(std::move(input));
      calls.push_back(std::move(others));
    }
    lists_.calls.erase(lists_.calls.begin() + static_cast<ptrdiff_t>(begin_), lists_.calls.end());
    std::move(calls.begin(), calls.end(), std::back_inserter(lists_.calls));
    backward_.end = lists_.calls.size();
  }

  static bool asks_for_input_and_others(const TapeCall& call) {
    const c10::List<bool> asked = call.arguments[kOutputMask].toBoolList();
    return asked[0] && (asked[1] || asked[2]) && call.outputs[0] >= 0;
  }

  // From the last call on: a call is needed if one that is needed reads what it makes, or if they touch the same memory and
  // one of them writes to it. A call with an effect counts as writing to all that it gets.
  void find_needed() {
    std::vector<bool> is_wanted(lists_.num_slots, false);
    std::vector<bool> is_read(memory_bytes_.size(), false), is_written(memory_bytes_.size(), false);
    const auto want = [&](int32_t slot) { is_wanted[static_cast<size_t>(slot)] = is_read[lists_.memory_of(slot)] = true; };
    for_each_slot(backward_.results, want);
    is_needed_.assign(lists_.calls.size() - begin_, false);
    for (size_t n = lists_.calls.size(); n-- > begin_;) {
      const TapeCall& call = lists_.calls[n];
      bool needed = false;
      for_each_made(call, [&](int32_t slot) { needed = needed || is_wanted[static_cast<size_t>(slot)]; });
      for_each_read(call, [&](int32_t slot) {
        const size_t memory = lists_.memory_of(slot);
        needed = needed || is_written[memory] || (call.has_effect && is_read[memory]);
      });
      is_needed_[n - begin_] = needed;
      if (!needed) continue;
      for_each_read(call, want);
      if (call.has_effect) for_each_read(call, [&](int32_t slot) { is_written[lists_.memory_of(slot)] = true; });
    }
  }

  void find_bytes() {
    memory_bytes_ = memory_bytes(lists_);
    for (const TapeOwn& own : lists_.own) {
      if (own.slot >= 0) memory_bytes_[lists_.memory_of(own.slot)] = 0;  // there in any order
    }
  }

  /// From the `first` of the calls on: of what is there when the backward begins or is made in it. Gradients of parameters
  /// stay in the first microbatch of a step, and are added to those in the others.
  int64_t peak_bytes(const Order& calls, bool is_first_microbatch, size_t first = 0) const {
    const auto call_at = [this](size_t n) -> const TapeCall& { return lists_.calls[n]; };
    const Lifetimes lifetimes(lists_.num_slots, calls | std::views::transform(call_at));
    std::vector<int> num_live(memory_bytes_.size(), 0);
    int64_t now = 0, peak = 0;
    const auto enter = [&](int32_t slot) {
      const size_t memory = lists_.memory_of(slot);
      if (num_live[memory]++ == 0) now += memory_bytes_[memory];
    };
    for (const int32_t slot : lifetimes.before) enter(slot);
    for (size_t k = 0; k < calls.size(); ++k) {
      for (const int32_t slot : lifetimes.begins[k]) enter(slot);
      if (k >= first) peak = std::max(peak, now);
      if (call_at(calls[k]).kind == TapeCall::Kind::kGradient && is_first_microbatch) continue;
      for (const int32_t slot : lifetimes.ends[k]) {
        const size_t memory = lists_.memory_of(slot);
        if (--num_live[memory] == 0) now -= memory_bytes_[memory];
      }
    }
    return peak;
  }

  /// As many of those that are not needed wait as memory allows: the last ones of them.
  bool order() {
    const size_t num_calls = is_needed_.size();
    Order recorded(num_calls);
    std::iota(recorded.begin(), recorded.end(), begin_);
    Order others;
    for (const size_t n : recorded) {
      if (!is_needed_[n - begin_]) others.push_back(n);
    }
    const int64_t first_peak = peak_bytes(recorded, true), other_peak = peak_bytes(recorded, false);
    for (size_t trial = 0; trial < kMostTrials && !others.empty(); ++trial) {
      const size_t first_waiting = others[others.size() * trial / kMostTrials];
      Order now, waiting;
      for (const size_t n : recorded) {
        const bool waits = !is_needed_[n - begin_] && n >= first_waiting;
        (waits ? waiting : now).push_back(n);
      }
      const size_t num_now = now.size();
      now.insert(now.end(), waiting.begin(), waiting.end());
      const auto first_moved =
          static_cast<size_t>(std::mismatch(now.begin(), now.end(), recorded.begin()).first - now.begin());
      const auto fits = [&](bool is_first, int64_t peak) {
        return peak_bytes(now, is_first, first_moved) <= peak - peak / kWorkspaceShare;
      };
      if (!fits(true, first_peak) || !fits(false, other_peak)) continue;
      apply(now);
      backward_.results_end = begin_ + num_now;
      return true;
    }
    return false;
  }

  void apply(const Order& order) {
    std::vector<TapeCall> calls;
    for (const size_t n : order) calls.push_back(std::move(lists_.calls[n]));
    std::move(calls.begin(), calls.end(), lists_.calls.begin() + static_cast<ptrdiff_t>(begin_));
  }

  TapeLists& lists_;
  TapeBackward& backward_;
  const size_t begin_;
  std::vector<bool> is_needed_;        // by call of the backward
  std::vector<int64_t> memory_bytes_;  // by memory
};

}  // namespace

void put_results_first(TapeLists& lists) {
  for (TapeBackward& backward : lists.backwards) backward.results_end = backward.end;
  if (!lists.backwards.empty()) LastBackward(lists).put_results_first();
}

}  // namespace smp::runtime
