// What the leaders of the replicas tell each other before a step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/exchange/step_protocol.h"

namespace smp::engine {

using runtime::Averaging, runtime::ModelSettings;

/// "2 of 4 parameters with requires_grad (pattern 9be17165), no communication hook after 0 registrations", of each model.
std::string describe(const std::vector<ModelSettings>& settings);

/// The step that one replica is about to run, or why it refuses to.
struct ReplicaStep {
  int32_t step_function = 0;
  uint64_t training_steps = 0;  // finished before this one
  bool trains = false;
  std::vector<Averaging> reduced{};       // by model
  std::vector<Averaging> asked{};         // of a training step: the same, of models that it makes no gradients of too
  std::vector<ModelSettings> settings{};  // by model
  std::string optimizers{};               // their steps and options, in lines
  std::string error{};
  bool is_value_error = false;
  bool reads = false;         // its body has read a value and goes on
  std::string homes{};        // who holds what, if the step places models
  bool has_joined = false;    // it has no step of its own any more
  uint64_t joined_after = 0;  // then: steps of its own

  static auto members(auto& self) {
    return std::tie(self.step_function, self.training_steps, self.trains, self.reduced, self.asked, self.settings,
                    self.optimizers, self.error, self.is_value_error, self.reads, self.homes, self.has_joined,
                    self.joined_after);
  }
  bool same_step(const ReplicaStep& other) const;
  /// "step function 1 (training) after 20 training steps, gradients averaged".
  std::string describe() const;
};

struct Refusal {
  std::string text;
  bool is_value_error = true;
  bool ends_join = false;
};

/// What keeps the replicas from running this step together, if anything does. `ends_early`: all must have one.
std::optional<Refusal> disagreement(const std::vector<ReplicaStep>& replicas, bool ends_early);

/// `reduced` of a training step of all that have one: what any of them makes concerns all.
std::vector<Averaging> united_reductions(const std::vector<ReplicaStep>& replicas);

/// When all have joined: the replica with the most steps, of several the first.
std::optional<int> most_steps_of_joined(const std::vector<ReplicaStep>& replicas);

}  // namespace smp::engine
