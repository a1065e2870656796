// What a rank keeps from step to step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "runtime/capture/body_capture.h"
#include "runtime/executor/executor.h"
#include "smp/engine/planning/auto_layout.h"
#include "smp/engine/context.h"
#include "smp/engine/state/models.h"
#include "smp/engine/planning/programs.h"
#include "smp/engine/timeline/step_timeline.h"
#include "smp/join.h"

namespace torch::optim {
class Optimizer;
}

namespace smp::engine {

/// The join in progress, or the last one.
struct JoinState {
  JoinOptions options{};
  uint64_t num_steps = 0;  // of this replica in it
};

/// A DistributedOptimizer that is alive.
struct OptimizerOfModel {
  torch::optim::Optimizer* optimizer;
  std::shared_ptr<const Model> model;
  uint64_t num_steps = 0;  // since all ranks held the same updates
};

struct RankState {
  explicit RankState(Context& own)
      : context(own), models(own), programs(own, models), executor(std::in_place, *own.pipeline, own.buffers) {}

  bool leads() const { return context.pipeline->rank() == 0; }
  /// Null where nothing is recorded.
  runtime::TimelineRecorder* recorder() const { return context.timeline ? &context.timeline->recorder() : nullptr; }

  Context& context;
  Models models;
  Programs programs;
  std::optional<runtime::Executor> executor;  // on the pipeline that this rank belongs to
  std::map<int, std::unique_ptr<runtime::BodyCapture>> captures;  // by step number
  AutoMicrobatches auto_microbatches;
  std::set<int> measured_steps;  // step functions whose operators were timed, or known
  JoinState join;
  runtime::BodyCapture* body_in_progress = nullptr;
  uint64_t training_steps = 0;
  std::vector<std::weak_ptr<OptimizerOfModel>> optimizers;
  uint64_t evaluation_steps = 0;  // steps without a backward
  uint64_t num_skipped_updates = 0;  // because of numbers that were not finite
};

}  // namespace smp::engine
