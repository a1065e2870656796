// What users mark to be computed again.
#include <c10/util/Exception.h>

#include "runtime/capture/recompute_regions.h"
#include "smp/engine/engine.h"

namespace smp {

void engine::enter_recompute_region(int64_t group, bool begins) { runtime::enter_recompute_region(group, begins); }
void engine::leave_recompute_region() { runtime::leave_recompute_region(); }

void engine::mark_for_recomputation(const std::string& module, const std::vector<at::Tensor>& parameters) {
  refuse_in_body("set_activation_checkpointing");
  TORCH_CHECK_VALUE(!parameters.empty(), "set_activation_checkpointing: expected a module with parameters, got '", module,
                    "', which has none. Make an smp::ActivationCheckpointingGuard in its forward.");
  runtime::mark_for_recomputation(parameters);
}

}  // namespace smp
