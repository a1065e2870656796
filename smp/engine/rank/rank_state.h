// What a rank keeps from step to step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "runtime/capture/body_capture.h"
#include "runtime/executor/executor.h"
#include "smp/engine/context/context.h"
#include "smp/engine/models/models.h"
#include "smp/engine/programs/programs.h"
#include "smp/engine/timeline/step_timeline.h"
#include "smp/engine/timeline/stragglers.h"

namespace smp::engine {

struct Optimizer;

/// Numbers of microbatches chosen so far, by step function and rows of the batch.
using AutoMicrobatches = std::map<std::pair<int, int64_t>, int64_t>;

struct RankState {
  explicit RankState(Context& own)
      : context(own), models(own), programs(own, models), executor(std::in_place, *own.pipeline, own.buffers) {}

  bool leads() const { return context.pipeline->rank() == 0; }
  /// Null where nothing is recorded.
  runtime::TimelineRecorder* recorder() const { return context.timeline ? &context.timeline->recorder() : nullptr; }
  /// That are alive, in the order in which they were made.
  std::vector<std::shared_ptr<Optimizer>> live_optimizers() const;

  Context& context;
  Models models;
  Programs programs;
  std::optional<runtime::Executor> executor;                      // on the pipeline that this rank belongs to
  std::map<int, std::unique_ptr<runtime::BodyCapture>> captures;  // by step number
  AutoMicrobatches auto_microbatches;
  std::set<int> measured_steps;  // step functions whose operators were timed, or known
  uint64_t training_steps = 0;
  std::vector<std::weak_ptr<Optimizer>> optimizers;
  uint64_t evaluation_steps = 0;     // steps without a backward
  uint64_t num_skipped_updates = 0;  // because of numbers that were not finite
  PaceRecorder pace;
  std::optional<Stragglers> stragglers;  // on world rank 0, once there has been a window
};

/// Ends what the rank keeps when its last model is gone. A join, which takes part in the steps of others, keeps it.
void forget_without_models(Context& context);

/// Of this rank's models. Throws c10::Error naming `caller` when there is no model.
RankState& rank_state(const char* caller);

}  // namespace smp::engine
