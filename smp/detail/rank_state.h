// What a rank keeps from step to step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "runtime/capture/body_capture.h"
#include "runtime/executor.h"
#include "smp/detail/context.h"
#include "smp/detail/models.h"
#include "smp/detail/programs.h"

namespace smp::detail {

struct RankState {
  explicit RankState(Context& own)
      : context(own), models(own), programs(own, models), executor(*own.pipeline, own.buffers) {}

  bool leads() const { return context.pipeline->rank() == 0; }

  Context& context;
  Models models;
  Programs programs;
  runtime::Executor executor;
  std::map<int, std::unique_ptr<runtime::BodyCapture>> captures;  // by step number
  runtime::BodyCapture* body_in_progress = nullptr;
  uint64_t training_steps = 0;
  uint64_t evaluation_steps = 0;  // steps without a backward
};

}  // namespace smp::detail
