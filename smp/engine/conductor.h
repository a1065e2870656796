// The way of one step on one rank: leaders lead, followers follow, replicas that have joined shadow the others.
#pragma once

#include <optional>

#include "smp/engine/rank/rank_state.h"
#include "smp/engine/step/step_run.h"
#include "smp/step_call.h"

namespace smp::engine {

class Conductor {
 public:
  explicit Conductor(RankState& rank) : rank_(rank) {}

  step_internal::Results run_step(int step_number, const step_internal::Call& call);
  /// Takes part in the steps of replicas that have more, then makes all replicas equal. Collective over all ranks.
  void finish_join();

 private:
  void forget_ended_steps();
  void begin_recorded_step();
  void end_recorded_step();
  step_internal::Results follow(int step_number);
  runtime::StepMessage receive_message();
  void check_is_for_us(const runtime::StepMessage& message) const;
  void accept(const runtime::StepMessage& message, int step_number);
  void check_settings(const runtime::StepMessage& message) const;
  std::optional<step_internal::Results> perform(StepRun& run, const runtime::StepMessage& message, int step_number);
  int lead_join();
  int follow_join();
  void take_over_from(int replica);
  Context& context() const { return rank_.context; }

  RankState& rank_;
};

}  // namespace smp::engine
