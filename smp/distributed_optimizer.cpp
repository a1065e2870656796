// Which optimizers may run on a part of the parameters.
#include "smp/distributed_optimizer.h"

#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>

namespace smp::optimizer_internal {

void check_elementwise(const torch::optim::Optimizer& optimizer) {
  TORCH_CHECK_VALUE(dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
                    "DistributedOptimizer: expected an optimizer that updates each element by itself (SGD, Adam, AdamW, "
                    "RMSprop, Adagrad), got LBFGS, whose steps mix all parameters and cannot be split over ranks.");
}

}  // namespace smp::optimizer_internal
