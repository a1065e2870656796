// The first updates of an optimizer whose rule is not known, on several ranks.
#pragma once

#include <functional>

#include "smp/engine/optimizers/optimizer.h"
#include "smp/engine/rank/rank_state.h"

namespace smp::engine {

/// Whether the next update is to be watched. The same on all ranks of the pipeline.
bool is_to_be_watched(const RankState& own, const Optimizer& optimizer);

/// Runs `update`, which calls the optimizer's step. Where on any rank of the pipeline it has used what comes from several
/// parameters, or has thrown, all of them throw and nothing has changed. Collective over the pipeline.
void watched_update(RankState& own, Optimizer& optimizer, const std::function<void()>& update);

}  // namespace smp::engine
