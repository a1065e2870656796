// The unit is a memory: all calls that make or write to one run again, or none, for views and operators in place share it.
#include "runtime/stage/remade_calls.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "runtime/capture/operator_info.h"

namespace smp::runtime {
namespace {

constexpr size_t kNever = 0;  // else: a position, from 1 on

class Remaking {
 public:
  Remaking(TapeLists& lists, const Slots& fixed, const partitioner::Recomputation& recomputation)
      : lists_(lists), fixed_(fixed), recomputation_(recomputation), memories_(num_memories()), unit_(memories_.size()) {
    std::iota(unit_.begin(), unit_.end(), size_t{0});
    note_what_stays();
    note_calls();
  }

  void run() {
    find_what_runs_again();
    join_units();
    const std::vector<bool> is_remade = find_remade();
    if (std::find(is_remade.begin(), is_remade.end(), true) != is_remade.end()) insert(is_remade);
  }

 private:
  struct Memory {
    std::vector<size_t> calls;   // of the forward, that make or write to it
    size_t last_write = kNever;  // of the forward
    bool stays = false;          // is not made here, leaves, or is written to in a backward
    bool is_read_backward = false;
  };
  using CallsOfUnit = std::vector<std::vector<size_t>>;

  size_t num_memories() const {
    int32_t most = -1;
    for (const int32_t memory : lists_.slot_memories) most = std::max(most, memory);
    return static_cast<size_t>(most + 1);
  }

  Memory& memory_of(int32_t slot) { return memories_[lists_.memory_of(slot)]; }

  void note_what_stays() {
    const auto stay = [this](int32_t slot) { memory_of(slot).stays = true; };
    for (const auto& input : lists_.inputs) {
      if (input.slot >= 0) stay(input.slot);
    }
    for (const auto& own : lists_.own) {
      if (own.slot >= 0) stay(own.slot);
      if (own.is_written) written_own_.insert(own.tensor.storage().unsafeGetStorageImpl());
    }
    for (size_t slot = 0; slot < fixed_.size(); ++slot) {
      if (fixed_[slot].defined()) stay(static_cast<int32_t>(slot));
    }
    for_each_leaving(lists_, stay);
  }

  template <class Visit>
  static void for_each_written(const TapeCall& call, const Visit& visit) {
    if (call.kind != TapeCall::Kind::kOperator || !call.has_effect) return;
    const std::vector<bool>& is_written = operator_info(call.op).argument_written;
    for (const auto& tensor : call.tensors) {
      if (is_written[tensor.position]) visit(tensor.slot);
    }
    for (const auto& list : call.lists) {
      if (is_written[list.position]) for_each_slot(list.slots, visit);
    }
  }

  void note_calls() {
    for (size_t n = 0; n < lists_.calls.size(); ++n) {
      const TapeCall& call = lists_.calls[n];
      const bool is_forward = n < lists_.forward_end;
      const auto note = [&](int32_t slot) {
        Memory& memory = memory_of(slot);
        memory.stays = memory.stays || !is_forward;
        if (!is_forward) return;
        if (memory.calls.empty() || memory.calls.back() != n) memory.calls.push_back(n);
      };
      if (is_forward || call.kind == TapeCall::Kind::kOperator) for_each_made(call, note);
      for_each_written(call, note);
      if (is_forward && call.kind == TapeCall::Kind::kOperator) {
        for_each_made(call, [&](int32_t slot) { memory_of(slot).last_write = n + 1; });
        for_each_written(call, [&](int32_t slot) { memory_of(slot).last_write = n + 1; });
      }
      if (!is_forward) for_each_read(call, [&](int32_t slot) { memory_of(slot).is_read_backward = true; });
    }
  }

  // A parameter or buffer that somebody writes to has other numbers by then.
  bool uses_written_own(const TapeCall& call) const {
    const auto is_written = [this](const at::Tensor& tensor) {
      return tensor.defined() && tensor.has_storage() && written_own_.contains(tensor.storage().unsafeGetStorageImpl());
    };
    const bool by_argument = std::any_of(call.arguments.begin(), call.arguments.end(), [&](const c10::IValue& argument) {
      return argument.isTensor() && is_written(argument.toTensor());
    });
    bool by_slot = false;
    for_each_read(call, [&](int32_t slot) { by_slot = by_slot || is_written(fixed_[static_cast<size_t>(slot)]); });
    for (const auto& own : lists_.own) {
      if (own.slot < 0 || !own.is_written) continue;
      for_each_read(call, [&](int32_t slot) { by_slot = by_slot || lists_.memory_of(slot) == lists_.memory_of(own.slot); });
    }
    return by_argument || by_slot;
  }

  // Until nothing changes: a call runs again if it finds what it found, a memory is made again if all its calls run again.
  void find_what_runs_again() {
    for (size_t n = 0; n < lists_.forward_end; ++n) {
      const TapeCall& call = lists_.calls[n];
      const bool is_kept =
          call.kind == TapeCall::Kind::kOperator && recomputation_.keeps(call.node);  // not what it looks at
      runs_again_.push_back(!is_kept && !uses_written_own(call));
    }
    for (bool changes = true; changes;) {
      changes = false;
      for (Memory& memory : memories_) {
        const bool are_all =
            std::all_of(memory.calls.begin(), memory.calls.end(), [this](size_t n) { return runs_again_[n]; });
        if (!memory.stays && !are_all) memory.stays = changes = true;
      }
      for_each_group([&](size_t begin, size_t end) {
        bool can = true;
        for (size_t n = begin; n < end; ++n) can = can && runs_again_[n] && finds_the_same(n);
        for (size_t n = begin; n < end && !can; ++n) {
          changes = changes || runs_again_[n];
          runs_again_[n] = false;
        }
      });
    }
  }

  bool finds_the_same(size_t n) {
    bool same = true;
    for_each_read(lists_.calls[n], [&](int32_t slot) {
      const Memory& memory = memory_of(slot);
      same = same && !(memory.stays && memory.last_write > n);  // not before it, as positions count from 1 on
    });
    for_each_written(lists_.calls[n], [&](int32_t slot) { same = same && !memory_of(slot).stays; });
    return same;
  }

  /// Calls that run together: those that draw under one seed, and each other one.
  template <class Visit>
  void for_each_group(const Visit& visit) const {
    for (size_t begin = 0, end; begin < lists_.forward_end; begin = end) {
      end = begin + 1;
      if (lists_.calls[begin].random_ordinal < 0) {
        visit(begin, end);
        continue;
      }
      while (end < lists_.forward_end && !lists_.calls[end - 1].ends_random) ++end;
      visit(begin, end);
    }
  }

  // What is made together, and what is made of a memory before the last write to it.
  void join_units() {
    for_each_group([this](size_t begin, size_t end) {
      size_t first = memories_.size();
      const auto join = [&](size_t memory) {
        if (memories_[memory].stays) return;
        first == memories_.size() ? void(first = memory) : unite(first, memory);
      };
      for (size_t n = begin; n < end; ++n) {
        const TapeCall& call = lists_.calls[n];
        for_each_made(call, [&](int32_t slot) { join(lists_.memory_of(slot)); });
        for_each_written(call, [&](int32_t slot) { join(lists_.memory_of(slot)); });
        for_each_read(call, [&](int32_t slot) {
          if (memory_of(slot).last_write > n + 1) join(lists_.memory_of(slot));
        });
      }
    });
  }

  size_t unit_of(size_t memory) {
    while (unit_[memory] != memory) memory = unit_[memory] = unit_[unit_[memory]];
    return memory;
  }
  void unite(size_t a, size_t b) { unit_[unit_of(b)] = unit_of(a); }

  /// By unit: needed by a backward, or by what is remade for it.
  std::vector<bool> find_remade() {
    std::vector<bool> is_remade(memories_.size(), false);
    for (size_t m = 0; m < memories_.size(); ++m) {
      if (!memories_[m].stays && memories_[m].is_read_backward) is_remade[unit_of(m)] = true;
    }
    for (bool changes = true; changes;) {
      changes = false;
      calls_ = calls_of_units(is_remade);
      for (size_t unit = 0; unit < memories_.size(); ++unit) {
        for (const size_t n : calls_[unit]) {
          for_each_read(lists_.calls[n], [&](int32_t slot) {
            const size_t memory = lists_.memory_of(slot);
            if (memories_[memory].stays || is_remade[unit_of(memory)]) return;
            is_remade[unit_of(memory)] = changes = true;
          });
        }
      }
    }
    return is_remade;
  }

  CallsOfUnit calls_of_units(const std::vector<bool>& is_remade) {
    CallsOfUnit calls(memories_.size());
    for_each_group([&](size_t begin, size_t end) {
      size_t unit = memories_.size();
      const auto look = [&](int32_t slot) {
        if (!memory_of(slot).stays) unit = unit_of(lists_.memory_of(slot));
      };
      for (size_t n = begin; n < end; ++n) {
        for_each_made(lists_.calls[n], look);
        for_each_written(lists_.calls[n], look);
      }
      if (unit == memories_.size() || !is_remade[unit]) return;
      for (size_t n = begin; n < end; ++n) {
        const TapeCall& call = lists_.calls[n];
        const bool is_there = call.kind == TapeCall::Kind::kView && memory_of(call.outputs.front()).stays;
        if (!is_there) calls[unit].push_back(n);
      }
    });
    return calls;
  }

  void insert(const std::vector<bool>& is_remade) {
    std::vector<TapeCall> calls(lists_.calls.begin(), lists_.calls.begin() + static_cast<ptrdiff_t>(lists_.forward_end));
    std::vector<bool> is_there(memories_.size(), false);  // by unit
    // Units may need each other, so all that are needed now run again together, in the forward's order.
    const auto collect = [&](const auto& self, int32_t slot, std::vector<size_t>& found) -> void {
      const size_t memory = lists_.memory_of(slot);
      if (memories_[memory].stays) return;
      const size_t unit = unit_of(memory);
      if (!is_remade[unit] || is_there[unit]) return;
      is_there[unit] = true;
      found.insert(found.end(), calls_[unit].begin(), calls_[unit].end());
      for (const size_t n : calls_[unit]) {
        for_each_read(lists_.calls[n], [&](int32_t read) { self(self, read, found); });
      }
    };
    const auto make = [&](int32_t slot) {
      std::vector<size_t> found;
      collect(collect, slot, found);
      std::sort(found.begin(), found.end());
      for (const size_t n : found) {
        TapeCall& again = calls.emplace_back(lists_.calls[n]);
        for_each_made(again, [this](int32_t& made) {
          if (memory_of(made).stays) made = -1;
        });
        lists_.remakes_random = lists_.remakes_random || again.random_ordinal >= 0;
      }
    };
    size_t n = lists_.forward_end;
    for (TapeBackward& backward : lists_.backwards) {
      for (; n < backward.end; ++n) {
        for_each_read(lists_.calls[n], make);
        calls.push_back(lists_.calls[n]);
      }
      backward.end = calls.size();
    }
    lists_.calls = std::move(calls);
  }

  TapeLists& lists_;
  const Slots& fixed_;
  const partitioner::Recomputation& recomputation_;
  std::vector<Memory> memories_;
  std::vector<size_t> unit_;  // by memory, as union-find: what runs again together
  std::unordered_set<const c10::StorageImpl*> written_own_;
  std::vector<bool> runs_again_;  // by call of the forward
  CallsOfUnit calls_;             // in program order
};

}  // namespace

void remake(TapeLists& lists, const Slots& fixed, const partitioner::Recomputation& recomputation) {
  Remaking(lists, fixed, recomputation).run();
}

}  // namespace smp::runtime
