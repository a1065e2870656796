// Clipping by the global norm over all stages.
#pragma once

#include "smp/distributed_model.h"

namespace smp {

/// Scales all gradients so that their global norm is at most `max_norm`; returns the norm before clipping. Per-parameter
/// norms are gathered in the module's order and every rank evaluates the same expression, so the bits do not depend on the
/// partition; a tied weight counts once. Collective over the pipeline; call it after the step and before optimizer.step().
/// `norm_type`: the p of the norm, infinity allowed. Throws c10::ValueError unless max_norm > 0, and inside a step body.
double clip_grad_norm_(DistributedModelBase& model, double max_norm, double norm_type = 2.0);

}  // namespace smp
