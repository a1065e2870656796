// From when to when the slots of a flat list of calls hold tensors.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/stage/flat_call.h"

namespace smp::runtime {

/// A slot has a lifetime for each call that makes it without reading it, so what is computed a second time is not kept in
/// between.
struct Lifetimes {
  /// `calls`: in the order in which they run.
  template <class Calls>
  Lifetimes(size_t num_slots, const Calls& calls) : last(num_slots, -1) {
    for (const FlatCall& call : calls) add(call);
    for (size_t slot = 0; slot < num_slots; ++slot) {
      if (last[slot] >= 0) ends[static_cast<size_t>(last[slot])].push_back(static_cast<int32_t>(slot));
    }
  }

  std::vector<int32_t> before;                     // slots that hold a tensor when the first call begins
  std::vector<std::vector<int32_t>> begins, ends;  // by call: slots of which a lifetime begins or ends with it
  std::vector<int> last;                           // by slot: the last call that reads or makes it; -1: none

 private:
  void add(const FlatCall& call) {
    const auto now = static_cast<int>(ends.size());
    begins.emplace_back();
    ends.emplace_back();
    for_each_read(call, [&](int32_t slot) {
      int& last_of_slot = last[static_cast<size_t>(slot)];
      if (last_of_slot < 0) before.push_back(slot);
      last_of_slot = now;
    });
    for_each_made(call, [&](int32_t slot) {
      const int last_of_slot = std::exchange(last[static_cast<size_t>(slot)], now);
      if (last_of_slot == now) return;  // the call writes to what it reads
      if (last_of_slot >= 0) ends[static_cast<size_t>(last_of_slot)].push_back(slot);
      begins.back().push_back(slot);
    });
  }
};

}  // namespace smp::runtime
