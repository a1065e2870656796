// Which calls of a backward may wait.
#include "runtime/stage/tape_order.h"

#include <algorithm>
#include <numeric>

#include "runtime/libtorch/memory_tensor.h"

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
    find_needed();
    find_bytes();
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

  template <class Use>
  static void for_arguments(const TapeCall& call, const Use& use) {
    for (const auto& tensor : call.tensors) use(tensor.slot);
    for (const auto& list : call.lists) {
      for (const int32_t slot : list.slots) {
        if (slot >= 0) use(slot);
      }
    }
  }

  template <class Use>
  static void for_outputs(const TapeCall& call, const Use& use) {
    for (const int32_t slot : call.outputs) {
      if (slot >= 0) use(slot);
    }
  }

  size_t memory_of(int32_t slot) const { return static_cast<size_t>(lists_.slot_memories[static_cast<size_t>(slot)]); }

  // From the last call on: a call is needed if one that is needed reads what it makes, or if they touch the same memory and
  // one of them writes to it. A call with an effect counts as writing to all that it gets.
  void find_needed() {
    std::vector<bool> is_wanted(lists_.num_slots, false);
    const size_t num_memories =
        1 + static_cast<size_t>(*std::max_element(lists_.slot_memories.begin(), lists_.slot_memories.end()));
    std::vector<bool> is_read(num_memories, false), is_written(num_memories, false);
    for (const int32_t slot : backward_.results) {
      if (slot < 0) continue;
      is_wanted[static_cast<size_t>(slot)] = true;
      is_read[memory_of(slot)] = true;
    }
    is_needed_.assign(lists_.calls.size() - begin_, false);
    for (size_t n = lists_.calls.size(); n-- > begin_;) {
      const TapeCall& call = lists_.calls[n];
      bool needed = false;
      for_outputs(call, [&](int32_t slot) { needed = needed || is_wanted[static_cast<size_t>(slot)]; });
      for_arguments(call, [&](int32_t slot) {
        const size_t memory = memory_of(slot);
        needed = needed || is_written[memory] || (call.has_effect && is_read[memory]);
      });
      is_needed_[n - begin_] = needed;
      if (!needed) continue;
      for_arguments(call, [&](int32_t slot) {
        is_wanted[static_cast<size_t>(slot)] = true;
        is_read[memory_of(slot)] = true;
        if (call.has_effect) is_written[memory_of(slot)] = true;
      });
    }
  }

  void find_bytes() {
    for (size_t slot = 0; slot < lists_.num_slots; ++slot) {
      const size_t memory = memory_of(static_cast<int32_t>(slot));
      if (memory_bytes_.size() <= memory) memory_bytes_.resize(memory + 1, 0);
      memory_bytes_[memory] = std::max(memory_bytes_[memory], extent_bytes(lists_.slot_geometries[slot]));
    }
    for (const TapeOwn& own : lists_.own) {
      if (own.slot >= 0) memory_bytes_[memory_of(own.slot)] = 0;  // there in any order
    }
  }

  /// From the `first` of the calls on: of what is there when the backward begins or is made in it. Gradients of parameters
  /// stay in the first microbatch of a step, and are added to those in the others.
  int64_t peak_bytes(const Order& calls, bool is_first_microbatch, size_t first = 0) const {
    std::vector<int> last_use(lists_.num_slots, -1);
    std::vector<bool> is_live(lists_.num_slots, false);
    std::vector<int> num_live(memory_bytes_.size(), 0);
    int64_t now = 0;
    const auto enter = [&](int32_t slot) {
      if (is_live[static_cast<size_t>(slot)]) return;
      is_live[static_cast<size_t>(slot)] = true;
      if (num_live[memory_of(slot)]++ == 0) now += memory_bytes_[memory_of(slot)];
    };
    for (size_t k = 0; k < calls.size(); ++k) {
      const auto note = [&](int32_t slot) { last_use[static_cast<size_t>(slot)] = static_cast<int>(k); };
      for_arguments(lists_.calls[calls[k]], note);
      for_outputs(lists_.calls[calls[k]], note);
    }
    std::vector<bool> is_made(lists_.num_slots, false);
    for (const size_t n : calls) {
      for_arguments(lists_.calls[n], [&](int32_t slot) {
        if (!is_made[static_cast<size_t>(slot)]) enter(slot);
      });
      for_outputs(lists_.calls[n], [&](int32_t slot) { is_made[static_cast<size_t>(slot)] = true; });
    }
    int64_t peak = first == 0 ? now : 0;
    for (size_t k = 0; k < calls.size(); ++k) {
      const TapeCall& call = lists_.calls[calls[k]];
      for_outputs(call, enter);
      if (k >= first) peak = std::max(peak, now);
      const auto leave = [&](int32_t slot) {
        if (last_use[static_cast<size_t>(slot)] != static_cast<int>(k) || !is_live[static_cast<size_t>(slot)]) return;
        is_live[static_cast<size_t>(slot)] = false;
        if (--num_live[memory_of(slot)] == 0) now -= memory_bytes_[memory_of(slot)];
      };
      if (call.kind == TapeCall::Kind::kGradient && is_first_microbatch) continue;
      for_arguments(call, leave);
      for_outputs(call, leave);
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
