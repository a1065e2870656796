// What the leaders of the replicas tell each other before a step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::engine {

/// What a training step does with the gradients of a model: averages them, keeps them as NoSync and
/// backward_passes_per_step ask for, or makes none. A text of one of these for each model travels.
inline constexpr char kAverages = '1', kKeeps = '0', kMakesNone = '-';

/// The step that one replica is about to run, or why it refuses to.
struct ReplicaStep {
  int32_t step_function = 0;
  uint64_t training_steps = 0;  // finished before this one
  bool trains = false;
  std::string reduced{};     // by model: kAverages and others
  std::string asked{};       // of a training step: the same, of models that it makes no gradients of too
  std::string settings{};    // what must not differ between ranks that train, in words
  std::string optimizers{};  // their steps and options, in lines
  std::string error{};
  bool is_value_error = false;
  bool reads = false;         // its body has read a value and goes on
  std::string homes{};        // who holds what, if the step places models
  bool has_joined = false;    // it has no step of its own any more
  uint64_t joined_after = 0;  // then: steps of its own

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
std::string united_reductions(const std::vector<ReplicaStep>& replicas);

/// When all have joined: the replica with the most steps, of several the first.
std::optional<int> most_steps_of_joined(const std::vector<ReplicaStep>& replicas);

std::string encode(const ReplicaStep& step);
/// Throws std::runtime_error for bytes that are none.
ReplicaStep decode_replica_step(std::string_view bytes);

/// Every replica's, by replica. Collective over `replicas`.
std::vector<ReplicaStep> gather(const ReplicaStep& own, runtime::Transport& replicas);

}  // namespace smp::engine
