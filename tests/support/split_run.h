// A model of the zoo run through the public API, with the same result type as the oracle.
#pragma once

#include <memory>

#include "tests/support/oracle.h"

namespace smp::support {

/// One training (or evaluation) step of `model` on the calling rank: public API only. Gradients and buffers are those
/// that live on this rank.
OracleResult run_split(const ZooModel& model, const std::shared_ptr<torch::nn::Module>& module,
                       const std::vector<at::Tensor>& full_batch, int num_steps = 1);

}  // namespace smp::support
