// How a call finds what its rank keeps.
#include "smp/engine/rank/rank_state.h"

#include <c10/util/Exception.h>

namespace smp::engine {

std::vector<std::shared_ptr<Optimizer>> RankState::live_optimizers() const {
  std::vector<std::shared_ptr<Optimizer>> alive;
  for (const auto& weak : optimizers) {
    if (auto optimizer = weak.lock()) alive.push_back(std::move(optimizer));
  }
  return alive;
}

RankState& rank_state(const char* caller) {
  Context& own = context(caller);
  TORCH_CHECK(own.rank_state != nullptr, caller,
              ": expected a DistributedModel, got none. Wrap the module first: ", "smp::DistributedModel model(net);");
  return *own.rank_state;
}

}  // namespace smp::engine
