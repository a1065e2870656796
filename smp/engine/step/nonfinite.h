// Losses and gradients that are not finite: found by the ranks that have them, known to all alike.
#pragma once

#include <memory>
#include <vector>

#include "runtime/executor/executor.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/engine/replicas/replica_step.h"

namespace smp::engine {

/// Before a training step: a loss of an earlier one counts on in models whose gradients have not been
/// cleared since. `has_step`: false on a replica that has joined; nobody clears its gradients.
void note_cleared(const RankState& rank, bool has_step = true);

/// Looks at the losses that were computed here. `programs` and `results` by microbatch; `reduced`: see Averaging.
void note_losses(RankState& rank, const std::vector<std::shared_ptr<Program>>& programs, const runtime::RankResults& results,
                 const std::vector<Averaging>& reduced);

/// At the end of training step `number`: looks at the gradients of the models that it has trained, of
/// what their optimizers update, and tells all ranks. Collective over the world.
void agree_on_nonfinite(RankState& rank, const std::vector<Averaging>& reduced, uint64_t number);

/// Whether an optimizer may update the model, as Config::nonfinite says; with finite gradients whatever the loss was. Throws
/// c10::Error where that is an error.
bool may_update(RankState& rank, const Model& model, bool has_finite_gradients);

}  // namespace smp::engine
