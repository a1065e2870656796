// The way of one step on one rank: leaders lead, followers follow, replicas that have joined shadow the others.
#pragma once

#include "smp/engine/rank/rank_state.h"
#include "smp/step_call.h"

namespace smp::engine {

step_internal::Results step_on_rank(RankState& rank, int step_number, const step_internal::Call& call);
/// Takes part in the steps of replicas that have more, then makes all replicas equal. Collective over all ranks.
void finish_join(RankState& rank);

}  // namespace smp::engine
