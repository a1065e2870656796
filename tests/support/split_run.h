// A model of the zoo run through the public API, with the same result type as the oracle.
#pragma once

#include <functional>

#include "smp/distributed_model.h"
#include "tests/support/oracle.h"

namespace smp::support {

/// Config::seed of a job whose run_split() is compared with run_unsplit().
constexpr uint64_t kSplitBaseSeed = 5;

/// One training step of a new module of `model` on the calling rank: public API only. The batch is one that 1, 2, 5 and 8
/// microbatches divide. Gradients are those that live on this rank; buffers are gathered.
/// With replicas, each takes its part of the batch.
struct SplitOptions {
  ModelOptions model{};
  int64_t bucket_bytes = 0;             // of gradients, 0: as configured; the zoo's models are much smaller than a MiB
  std::function<void()> look = [] {};  // called after the step, while the model lives
};
OracleResult run_split(const ZooModel& model, const SplitOptions& options = {});

/// The same step by the oracle.
OracleResult run_unsplit(const ZooModel& model, int microbatches);

/// What expect_same_step allows between the two: replicated tied weights add their gradients in another order.
double gradient_tolerance(const ZooModel& model, int stages);

}  // namespace smp::support
