// Exchange between leaders.
#include "smp/engine/replicas/replica_step.h"

#include <algorithm>
#include <sstream>

#include "smp/engine/optimizers/optimizer_settings.h"

namespace smp::engine {

std::string describe(const std::vector<ModelSettings>& settings) {
  std::ostringstream text;
  for (const ModelSettings& own : settings) {
    text << (text.tellp() > 0 ? "; " : "") << own.prefix << own.num_trainable << " of " << own.num_parameters
         << " parameters with requires_grad (pattern " << std::hex << own.pattern << std::dec << "), "
         << (own.has_hook ? "" : "no ") << "communication hook after " << own.num_hooks << " registrations";
  }
  return text.str();
}

bool ReplicaStep::same_step(const ReplicaStep& other) const {
  // What a body becomes is not known while it reads.
  const bool same_kind = reads || other.reads || (trains == other.trains && asked == other.asked);
  return step_function == other.step_function && training_steps == other.training_steps && same_kind;
}

std::string ReplicaStep::describe() const {
  std::string text = "step function " + std::to_string(step_function) + (trains ? " (training)" : " (evaluation)") +
                     " after " + std::to_string(training_steps) + " training steps";
  for (size_t m = 0; m < asked.size(); ++m) {
    text += std::string(m == 0 ? ", gradients " : ", ") + (asked[m] == Averaging::kAverages ? "averaged" : "kept");
  }
  return text;
}

std::optional<Refusal> disagreement(const std::vector<ReplicaStep>& replicas, bool ends_early) {
  const auto has_joined = [](const ReplicaStep& step) { return step.has_joined; };
  const auto active = std::find_if_not(replicas.begin(), replicas.end(), has_joined);
  const auto joined = std::find_if(replicas.begin(), replicas.end(), has_joined);
  const auto first = static_cast<size_t>(active - replicas.begin());
  const bool some_have_joined = active != replicas.end() && joined != replicas.end();
  const std::string who = "replica " + std::to_string(joined - replicas.begin());
  if (some_have_joined && ends_early) {
    return Refusal{.text = "smp::join: expected batches on all replicas, as throw_on_early_termination asks, got none on " +
                           who + " and one on replica " + std::to_string(first) +
                           ". Catch this and go on, or give each replica as many.",
                   .ends_join = true};
  }
  for (size_t r = 0; r < replicas.size(); ++r) {
    if (replicas[r].error.empty()) continue;
    return Refusal{"replica " + std::to_string(r) + " refused the step: " + replicas[r].error, replicas[r].is_value_error};
  }
  if (some_have_joined && !active->homes.empty()) {
    return Refusal{"step: expected a batch on every replica for the step that places a model, got none on " + who +
                   ", which has run out of batches. Give each replica at least one in smp::join."};
  }
  for (size_t r = first + 1; r < replicas.size(); ++r) {
    if (replicas[r].has_joined) continue;
    const std::string difference = " on replica " + std::to_string(first);
    if (!replicas[r].same_step(*active)) {
      return Refusal{
          "step: expected all replicas to run the same step, got " + active->describe() + difference + " and " +
          replicas[r].describe() + " on replica " + std::to_string(r) +
          ". Give every replica the same number of batches (or see smp::join) and call step functions in the same order."};
    }
    // One that reads does not know yet what it will place.
    if (!replicas[r].reads && !active->reads && replicas[r].homes != active->homes) {
      return Refusal{
          "step: expected the first step of a model to run, on all replicas, the same operators on the same shapes, got a "
          "difference between replicas " +
          std::to_string(first) + " and " + std::to_string(r) + ". Give all replicas batches of one size."};
    }
  }
  for (size_t r = 0; r < replicas.size() && some_have_joined; ++r) {
    if (replicas[r].reduced.size() == active->reduced.size()) continue;
    return Refusal{"step: expected the same models on all replicas, got " + std::to_string(active->reduced.size()) +
                   " on replica " + std::to_string(first) + " and " + std::to_string(replicas[r].reduced.size()) +
                   " on replica " + std::to_string(r) + ". Keep them until smp::join returns."};
  }
  if (active == replicas.end() || !active->trains || active->reads) return std::nullopt;
  for (size_t r = first + 1; r < replicas.size(); ++r) {
    if (replicas[r].has_joined || replicas[r].reads || replicas[r].optimizers == active->optimizers) continue;
    return Refusal{differing_optimizers("step", active->optimizers, "replica " + std::to_string(first),
                                        replicas[r].optimizers, "replica " + std::to_string(r))};
  }
  for (size_t r = 0; r < replicas.size(); ++r) {
    if (replicas[r].reads || replicas[r].settings == active->settings) continue;
    return Refusal{"step: expected the same communication hooks and parameters with requires_grad on all replicas, got " +
                   describe(active->settings) + " on replica " + std::to_string(first) + " and " +
                   describe(replicas[r].settings) + " on replica " + std::to_string(r) +
                   ". Register hooks, freeze and unfreeze on every rank alike."};
  }
  return std::nullopt;
}

std::vector<Averaging> united_reductions(const std::vector<ReplicaStep>& replicas) {
  std::vector<Averaging> united;
  for (const ReplicaStep& step : replicas) {
    if (step.has_joined) continue;
    if (united.empty()) united = step.reduced;
    for (size_t m = 0; m < united.size() && m < step.reduced.size(); ++m) {
      if (united[m] == Averaging::kMakesNone) united[m] = step.reduced[m];
    }
  }
  return united;
}

std::optional<int> most_steps_of_joined(const std::vector<ReplicaStep>& replicas) {
  int best = 0;
  for (size_t r = 0; r < replicas.size(); ++r) {
    if (!replicas[r].has_joined) return std::nullopt;
    if (replicas[r].joined_after > replicas[static_cast<size_t>(best)].joined_after) best = static_cast<int>(r);
  }
  return best;
}

}  // namespace smp::engine
