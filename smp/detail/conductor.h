// Drives a step: record the body, plan, table, execute. The one place that knows both floors below.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/capture/body_capture.h"
#include "runtime/executor.h"
#include "runtime/step_protocol.h"
#include "smp/detail/context.h"
#include "smp/detail/models.h"
#include "smp/detail/programs.h"
#include "smp/detail/replica_step.h"
#include "smp/state_dict.h"
#include "smp/step.h"

namespace torch::nn {
class Module;
}

namespace smp::detail {

/// The conductor of one rank: all models and step functions of a program.
class Conductor {
 public:
  explicit Conductor(Context& context);

  std::shared_ptr<Model> add_model(std::shared_ptr<torch::nn::Module> module, const std::string& name);
  /// Forgets the model, and everything recorded so far: recordings may hold its tensors.
  void remove_model(const Model& model);

  std::vector<StepOutput> run_step(int step_number, const step_internal::Call& call);

  /// The capture of the body that runs right now, or null.
  runtime::BodyCapture* body_in_progress() const { return body_in_progress_; }
  const Models& models() const { return models_; }
  Context& context() const { return context_; }
  StateDict::Steps steps() const { return {training_steps_, evaluation_steps_}; }
  /// Goes on as after that many steps. On all ranks alike.
  void set_steps(StateDict::Steps steps) { training_steps_ = steps.training, evaluation_steps_ = steps.evaluation; }
  void add_optimizer(const OptimizerMemory& memory) { programs_.add_optimizer(memory); }

 private:
  struct Captured {
    std::vector<std::vector<at::Tensor>> inputs;  // by microbatch
    std::vector<runtime::CapturedBody> bodies;
  };

  runtime::StepMessage lead(int step_number, const step_internal::Call& call, Captured& captured);
  std::vector<std::vector<at::Tensor>> split(const step_internal::Call& call) const;
  Captured capture(int step_number, const step_internal::Call& call);
  void add_programs(const Captured& captured, runtime::StepMessage& message);
  void agree_with_replicas(runtime::StepMessage& message);
  /// The checked table of the step. Throws c10::ValueError when its microbatches have different stages.
  const partitioner::Schedule& schedule_of(const runtime::StepMessage& message);
  bool trains(const runtime::StepMessage& message) const;
  bool places(const runtime::StepMessage& message);
  /// With the hooks of the models that it places.
  void place(const std::shared_ptr<Program>& program);
  bool is_placed_here(const runtime::NamedTensor& named) const;
  ReplicaStep own_replica_step(const runtime::StepMessage& message);
  runtime::StepMessage receive_message();
  void accept(const runtime::StepMessage& message, int step_number);
  std::vector<StepOutput> execute(const runtime::StepMessage& message, Captured* captured);
  std::vector<runtime::MicrobatchRun> prepare(const runtime::StepMessage& message, Captured* captured);
  void broadcast_buffers();

  Context& context_;
  Models models_;
  Programs programs_;
  runtime::Executor executor_;
  std::map<int, std::unique_ptr<runtime::BodyCapture>> captures_;  // by step number
  runtime::BodyCapture* body_in_progress_ = nullptr;
  uint64_t training_steps_ = 0;
  uint64_t evaluation_steps_ = 0;  // steps without a backward
};

/// The conductor of this rank's model. Throws c10::Error naming `caller` when there is no model.
Conductor& conductor(const char* caller);

}  // namespace smp::detail
