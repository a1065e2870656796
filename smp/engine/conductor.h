// The entry to steps on one rank. The one place, with its helpers here, that knows both floors below.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smp/engine/rank_state.h"
#include "smp/engine/step/step_run.h"
#include "smp/state_dict.h"
#include "smp/step.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace smp::engine {

/// The conductor of one rank: all models and step functions of a program.
class Conductor {
 public:
  explicit Conductor(Context& context) : rank_(context) {}

  std::shared_ptr<Model> add_model(std::shared_ptr<torch::nn::Module> module, const std::string& name);
  /// Forgets the model, and everything recorded so far: recordings may hold its tensors.
  void remove_model(const Model& model);

  std::vector<StepOutput> run_step(int step_number, const step_internal::Call& call);

  /// The capture of the body that runs right now, or null.
  runtime::BodyCapture* body_in_progress() const { return rank_.body_in_progress; }
  const Models& models() const { return rank_.models; }
  const Programs& programs() const { return rank_.programs; }
  Context& context() const { return rank_.context; }
  StateDict::Steps steps() const { return {rank_.training_steps, rank_.evaluation_steps}; }
  /// Goes on as after that many steps. On all ranks alike.
  void set_steps(StateDict::Steps steps) {
    rank_.training_steps = steps.training;
    rank_.evaluation_steps = steps.evaluation;
  }
  void add_optimizer(const OptimizerMemory& memory, const std::shared_ptr<OptimizerOfModel>& optimizer);

  /// Whether an optimizer may update the model now (Config::nonfinite). Throws c10::Error where
  /// that is an error.
  bool may_update(const Model& model);
  void count_optimizer_step(const torch::optim::Optimizer& optimizer);
  /// All ranks hold the same updates again. On all of them alike.
  void forget_optimizer_steps();
  /// Throws c10::ValueError, on all of `ranks`, where optimizers have stepped unequally often or
  /// have other options. Collective.
  void check_optimizers(runtime::Transport& ranks, const char* caller) const;

  /// Throws c10::ValueError for an optimizer whose state cannot be taken from one replica to another.
  void check_optimizer_states() const;
  void begin_join(const JoinOptions& options) { rank_.join = {options, 0}; }
  /// Takes part in the steps of replicas that have more, then makes all replicas equal. Collective over all ranks.
  void finish_join();

 private:
  void forget_ended_steps();
  void begin_recorded_step();
  void end_recorded_step();
  std::vector<StepOutput> follow(int step_number);
  runtime::StepMessage receive_message();
  void check_is_for_us(const runtime::StepMessage& message) const;
  void accept(const runtime::StepMessage& message, int step_number);
  void check_settings(const runtime::StepMessage& message) const;
  std::optional<std::vector<StepOutput>> perform(StepRun& run, const runtime::StepMessage& message, int step_number);
  int lead_join();
  int follow_join();
  void take_over_from(int replica);

  RankState rank_;
};

/// The conductor of this rank's models. Throws c10::Error naming `caller` when there is no model.
Conductor& conductor(const char* caller);

}  // namespace smp::engine
