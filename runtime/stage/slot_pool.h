// Slots of microbatches that have ended, for those to come: their memory is as large as is needed.
#pragma once

#include <utility>
#include <vector>

#include "runtime/stage/flat_call.h"

namespace smp::runtime {

class SlotPool {
 public:
  Slots take() {
    if (free_.empty()) return {};
    Slots slots = std::move(free_.back());
    free_.pop_back();
    return slots;
  }
  void give_back(Slots slots) {
    for (at::Tensor& tensor : slots) tensor.reset();
    free_.push_back(std::move(slots));
  }

 private:
  std::vector<Slots> free_;
};

}  // namespace smp::runtime
