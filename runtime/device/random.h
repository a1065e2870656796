// Randomness belongs to the operator, not to the rank: the seed of every random operator. Owns no generator.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <mutex>

#include "runtime/device/device.h"

namespace smp::runtime {

/// Which microbatch of which step draws random numbers.
struct RandomState {
  uint64_t base_seed = 0;
  uint64_t step = 0;        // training steps finished before this one
  uint64_t microbatch = 0;  // counted over all replicas: replica r's m-th is r * M + m
};

/// What one microbatch draws from. SplitMix64 finaliser over each component (Steele et al., OOPSLA 2014).
uint64_t random_stream(const RandomState& state);
/// A seed of the `ordinal`-th random operator of a stream, for an engine that reads 32 bits and no more: the CPU's
/// (mt19937).
uint32_t operator_seed(uint64_t stream, uint64_t ordinal);

/// Of a call with these arguments on top of the stack.
Draws draws_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// True for operators that draw from the default generator, composites such as dropout included.
bool is_random(const c10::OperatorHandle& op);

/// Keeps other ranks of the process from the default generator until destroyed: the generator is one per process, and in
/// tests several ranks are threads of one process. Not within another one.
class GeneratorHold {
 public:
  GeneratorHold();
  /// Reseeds the host's, where modules are made.
  explicit GeneratorHold(uint32_t seed);
  /// Puts those of the host and of the rank's device where the `ordinal`-th random operator of a step body draws: either may
  /// be where it makes its result.
  GeneratorHold(const RandomState& state, uint64_t ordinal, Draws draws = Draws::kByThread);

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
