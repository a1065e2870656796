// A model of the zoo run through the public API, with the same result type as the oracle.
#pragma once

#include <functional>

#include "smp/distributed_model.h"
#include "tests/support/oracle.h"

namespace smp::support {

/// Config::seed of a job whose run_split() is compared with run_unsplit().
constexpr uint64_t kSplitBaseSeed = 5;

/// A run of a new module of `model` on the calling rank: public API only. Losses and outputs are those of its last step;
/// gradients, of all steps together, are those that live on this rank; buffers are gathered.
/// With replicas, each takes its part of the batch.
struct SplitOptions {
  ModelOptions model{};
  int64_t bucket_bytes = 0;             // of gradients, 0: as configured; the zoo's models are much smaller than a MiB
  std::function<void()> look = [] {};  // called after the last step, while the model lives
  std::function<void(torch::nn::Module&)> place = [](torch::nn::Module&) {};  // before the first step
  int64_t batch = 40;                   // that microbatches divide: this one 1, 2, 5 and 8
  int steps = 1;
};
OracleResult run_split(const ZooModel& model, const SplitOptions& options = {});

/// The same steps by the oracle, which looks at `batch` and `steps` only.
OracleResult run_unsplit(const ZooModel& model, int microbatches, const SplitOptions& options = {});

/// What expect_same_step allows between the two: replicated tied weights add their gradients in another order.
double gradient_tolerance(const ZooModel& model, int stages);

}  // namespace smp::support
