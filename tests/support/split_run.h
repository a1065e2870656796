// A model of the zoo run through the public API, with the same result type as the oracle.
#pragma once

#include <functional>

#include "runtime/stage/stage.h"
#include "smp/config.h"
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
  int64_t bucket_bytes = 0;            // of gradients, 0: as configured; the zoo's models are much smaller than a MiB
  std::function<void()> look = [] {};  // called after the last step, while the model lives
  std::function<void(torch::nn::Module&)> place = [](torch::nn::Module&) {};  // before the first step
  int64_t batch = 40;  // that microbatches divide: this one 1, 2, 5 and 8
  int steps = 1;
  bool clears_gradients = false;  // before each step, so that those of the last are left
};
/// Of so many steps the last microbatches run from tapes: one to find out, one to record, one to compare.
inline constexpr int kStepsToTape = 4;

OracleResult run_split(const ZooModel& model, const SplitOptions& options = {});

/// Of the last of several steps, which runs from tapes.
inline const SplitOptions kLastOfSeveral{.steps = kStepsToTape, .clears_gradients = true};

/// How the stages of the first model on the calling rank have run. While it lives.
std::vector<runtime::StageReport> stage_reports();

/// A run of `model` on all ranks of one pipeline, put together.
struct PipelineRun {
  OracleResult result;
  std::vector<runtime::StageReport> reports;  // of all stages, in no order

  /// Whether every stage ran from its tape, whole.
  bool is_taped() const;
  /// Why not.
  std::string reasons() const;
};
/// Ranks are threads. Losses must agree between them. Config::seed is kSplitBaseSeed.
PipelineRun run_on_pipeline(const ZooModel& model, int ranks, Config config, const SplitOptions& options = {});

/// The same steps by the oracle, which looks at `batch`, `steps` and `clears_gradients` only.
OracleResult run_unsplit(const ZooModel& model, int microbatches, const SplitOptions& options = {});

}  // namespace smp::support
