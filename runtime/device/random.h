// Randomness belongs to the operator, not to the rank: the seed of every random operator. Owns no generator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <mutex>

namespace smp::runtime {

/// Which microbatch of which step draws random numbers.
struct RandomState {
  uint64_t base_seed = 0;
  uint64_t step = 0;        // training steps finished before this one
  uint64_t microbatch = 0;  // counted over all replicas: replica r's m-th is r * M + m
};

/// Seed of the `ordinal`-th random operator of a step body. 32 good bits, because the CPU engine (mt19937) reads no
/// more. SplitMix64 finaliser over each component (Steele et al., OOPSLA 2014).
uint32_t operator_seed(const RandomState& state, uint64_t ordinal);

/// True for operators that draw from the default generator, composites such as dropout included.
bool is_random(const c10::OperatorHandle& op);

/// Keeps other ranks of the process from the default generator until destroyed: the generator is one per process, and in
/// tests several ranks are threads of one process. Not within another one.
class GeneratorHold {
 public:
  GeneratorHold();
  /// Reseeds that of the rank's device, for one operator.
  explicit GeneratorHold(uint32_t seed);

 private:
  std::unique_lock<std::mutex> lock_;
};

/// Puts the user's own random state back when the last of the nested or concurrent scopes ends.
class UserRandomStateScope {
 public:
  UserRandomStateScope();
  ~UserRandomStateScope();
  UserRandomStateScope(const UserRandomStateScope&) = delete;
  UserRandomStateScope& operator=(const UserRandomStateScope&) = delete;
};

}  // namespace smp::runtime
