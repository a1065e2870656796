// torch::optim::Optimizer as an optimizer of the engine.
#pragma once

#include <memory>

#include "smp/engine/optimizer_view.h"

namespace torch::optim {
class Optimizer;
}

namespace smp {

/// `optimizer` must outlive the view. Options and state are known of LibTorch's elementwise optimizers; of others of the
/// program's own, what they update. Throws c10::ValueError for LBFGS.
std::unique_ptr<engine::OptimizerView> view_of(torch::optim::Optimizer& optimizer);

}  // namespace smp
