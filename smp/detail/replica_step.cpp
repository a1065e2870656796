// Exchange between leaders.
#include "smp/detail/replica_step.h"

#include "runtime/wire.h"

namespace smp::detail {

bool ReplicaStep::same_step(const ReplicaStep& other) const {
  // What a body becomes is not known while it reads.
  const bool same_kind = reads || other.reads || (trains == other.trains && reduction == other.reduction);
  return step_function == other.step_function && training_steps == other.training_steps && same_kind;
}

std::string ReplicaStep::describe() const {
  return "step function " + std::to_string(step_function) + (trains ? " (training)" : " (evaluation)") + " after " +
         std::to_string(training_steps) + " training steps" + (reduction.empty() ? "" : ", gradients " + reduction);
}

std::optional<Refusal> disagreement(const std::vector<ReplicaStep>& replicas) {
  for (size_t r = 0; r < replicas.size(); ++r) {
    if (replicas[r].error.empty()) continue;
    return Refusal{"replica " + std::to_string(r) + " refused the step: " + replicas[r].error, replicas[r].is_value_error};
  }
  for (size_t r = 1; r < replicas.size(); ++r) {
    if (!replicas[r].same_step(replicas[0])) {
      return Refusal{"step: expected all replicas to run the same step, got " + replicas[0].describe() +
                     " on replica 0 and " + replicas[r].describe() + " on replica " + std::to_string(r) +
                     ". Give every replica the same number of batches and call step functions in the same order."};
    }
    if (replicas[r].owners != replicas[0].owners) {
      return Refusal{"step: expected the first step of a model to run, on all replicas, the same operators on the same "
                     "shapes, got a difference between replicas 0 and " + std::to_string(r) +
                     ". Give all replicas batches of one size."};
    }
  }
  return std::nullopt;
}

std::vector<ReplicaStep> gather(const ReplicaStep& own, runtime::Transport& replicas) {
  runtime::WireWriter out;
  out.put(own.step_function);
  out.put(own.training_steps);
  out.put<uint8_t>(own.trains);
  out.put(own.reduction);
  out.put(own.error);
  out.put<uint8_t>(own.is_value_error);
  out.put<uint8_t>(own.reads);
  out.put(own.owners);
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
    step.reads = in.get<uint8_t>() != 0;
    step.owners = in.get_string();
  }
  return steps;
}

}  // namespace smp::detail
