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

void forget_without_models(Context& context) {
  if (context.rank_state && context.rank_state->models.all().empty() && !context.join) context.rank_state.reset();
}

RankState& rank_state(const char* caller) {
  Context& own = context(caller);
  TORCH_CHECK(own.rank_state != nullptr && !own.rank_state->models.all().empty(), caller,
              ": expected a DistributedModel, got none. Wrap the module first: ", "smp::DistributedModel model(net);");
  return *own.rank_state;
}

}  // namespace smp::engine
