// What the leader of a pipeline tells its followers at the start of a step, or of a round of one. Data and its encoding;
// sends nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/libtorch/tensor_spec.h"

namespace smp::runtime {

/// A program that the followers see for the first time: graph and plan as text (none where nobody follows), constants
/// beside them.
struct NewProgram {
  uint64_t hash = 0;
  std::string graph;
  std::string plan;
  std::vector<ConstantContent> constants;
};

/// What one microbatch runs: a program by hash, and what differs from it.
struct MicrobatchProgram {
  uint64_t hash = 0;
  std::vector<partitioner::ScalarOverride> scalars{};
  std::vector<ConstantContent> constants{};
};

/// What a training step does with the gradients of a model: averages them over replicas, keeps them as NoSync and
/// backward_passes_per_step ask for, or makes none.
enum class Averaging : uint8_t { kAverages, kKeeps, kMakesNone };
constexpr Averaging last_of(Averaging) { return Averaging::kMakesNone; }

/// What of a model must not differ between ranks that train it.
struct ModelSettings {
  std::string prefix{};  // of its tensors
  uint64_t num_trainable = 0, num_parameters = 0;
  uint32_t pattern = 0;  // of those with requires_grad among all
  bool has_hook = false;
  int32_t num_hooks = 0;  // registered so far
  bool operator==(const ModelSettings&) const = default;
  static auto members(auto& self) {
    return std::tie(self.prefix, self.num_trainable, self.num_parameters, self.pattern, self.has_hook, self.num_hooks);
  }
};

/// A step runs as one round, unless its body reads values: then as several, because the leader goes on with the body
/// when it has them.
enum class Round : uint8_t {
  kWhole,    // forward and backward of all microbatches; ends the step
  kForward,  // forward of the microbatches from `first` on, in place of those that ran before
  kProbe,    // the same, and forget it: the values that it reads are all that is wanted
  kFinish,   // backward of all microbatches; ends the step
  kShadow,   // a step of other replicas: averages gradients with them; ends the step
  kJoined,   // the replicas have no more steps in this join: no step; with an error, the join ends early
};
constexpr Round last_of(Round) { return Round::kJoined; }

/// One round of a step. `error` non-empty: the leader refused the step, and everybody throws that text.
struct StepMessage {
  int32_t step_function = 0;              // number of the step object; the same on all ranks unless they diverge
  uint64_t step = 0;                      // training steps finished before this one
  uint64_t evaluation_step = 0;           // and steps without a backward
  std::vector<Averaging> reduced{};       // by model
  std::vector<ModelSettings> settings{};  // of a training step, by model
  std::string optimizers{};               // steps and options of the leader's; compared where there are settings
  std::string error{};
  bool is_value_error = false;
  Round round = Round::kWhole;
  int32_t num_microbatches = 0;          // of the step
  int32_t first = 0;                     // number of microbatches[0] in the step
  bool trains = false;                   // some microbatch has a backward; decides the random numbers
  int32_t first_active_replica = 0;      // whose buffers all start with; kJoined: the one that all take over
  int32_t gradient_divisor = 1;          // of the sums of gradients over replicas
  std::vector<std::string> values{};     // where the step ends: what its bodies returned beside tensors, by microbatch
  std::optional<std::string> payload{};  // and how that is put together; none: as the first microbatch's program last said
  std::vector<uint64_t> forgotten{};     // programs that the leader has dropped
  std::vector<NewProgram> new_programs{};
  std::vector<MicrobatchProgram> microbatches{};
};

/// A step like the one before it takes some 30 bytes: microbatches that are alike are stored once.
std::string encode(const StepMessage& message);
/// Throws std::runtime_error for bytes that are no step message.
StepMessage decode_step_message(std::string_view bytes);

}  // namespace smp::runtime
