// DistributedOptimizer apart from the optimizer's type.
#include "smp/distributed_optimizer.h"

#include "smp/engine/engine.h"
#include "smp/torch_optimizer_view.h"

namespace smp::optimizer_internal {

Handle adopt(torch::optim::Optimizer& optimizer, const DistributedModelBase& model) {
  return engine::add_optimizer(view_of(optimizer), ModelAccess::shared(model));
}

bool begin_step(const Handle& optimizer) { return engine::begin_update(*optimizer); }
void run_step(const Handle& optimizer, const std::function<void()>& step) { engine::run_update(*optimizer, step); }
void zero_grad(const Handle& optimizer) { engine::zero_grad(*optimizer); }
OptimizerState state_dict(const Handle& optimizer) { return engine::state_dict(*optimizer); }
OptimizerState local_state_dict(const Handle& optimizer) { return engine::local_state_dict(*optimizer); }
void load_state_dict(const Handle& optimizer, const OptimizerState& state) { engine::load_state_dict(*optimizer, state); }

}  // namespace smp::optimizer_internal
