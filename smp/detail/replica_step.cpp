// Exchange between leaders.
#include "smp/detail/replica_step.h"

#include "runtime/wire.h"

namespace smp::detail {

bool ReplicaStep::same_step(const ReplicaStep& other) const {
  return step_function == other.step_function && training_steps == other.training_steps && trains == other.trains &&
         reduction == other.reduction;
}

std::string ReplicaStep::describe() const {
  return "step function " + std::to_string(step_function) + (trains ? " (training)" : " (evaluation)") + " after " +
         std::to_string(training_steps) + " training steps" + (reduction.empty() ? "" : ", gradients " + reduction);
}

std::vector<ReplicaStep> gather(const ReplicaStep& own, runtime::Transport& replicas) {
  runtime::WireWriter out;
  out.put(own.step_function);
  out.put(own.training_steps);
  out.put<uint8_t>(own.trains);
  out.put(own.reduction);
  out.put(own.error);
  out.put<uint8_t>(own.is_value_error);
  std::vector<ReplicaStep> steps;
  for (const std::string& bytes : replicas.all_gather(out.take())) {
    runtime::WireReader in(bytes);
    ReplicaStep& step = steps.emplace_back();
    step.step_function = in.get<int32_t>();
    step.training_steps = in.get<uint64_t>();
    step.trains = in.get<uint8_t>() != 0;
    step.reduction = in.get_string();
    step.error = in.get_string();
    step.is_value_error = in.get<uint8_t>() != 0;
  }
  return steps;
}

}  // namespace smp::detail
