// The parameters of modules that are computed again.
#include "smp/activation_checkpointing.h"

#include <torch/nn/module.h>

#include "smp/engine/engine.h"

namespace smp {

ActivationCheckpointingGuard::ActivationCheckpointingGuard() { engine::enter_recompute_region(); }
ActivationCheckpointingGuard::~ActivationCheckpointingGuard() { engine::leave_recompute_region(); }

void set_activation_checkpointing(const torch::nn::Module& module) {
  engine::mark_for_recomputation(module.name(), module.parameters());
}

}  // namespace smp
