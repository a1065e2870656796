// Answers torch::equal while a step body is captured. Owns the rule of when identity is answer enough.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "runtime/capture/bindings.h"

namespace smp::runtime {

/// A tensor equals itself, and tensors of different sizes differ: those answers are certain. Tensors made outside of
/// the step have values to compare. Anything else would be a value read, with one exception: torch::nn::MultiheadAttention
/// asks only to choose between one projection and three with the same weights, so "no" is an answer there whatever the
/// values are. Its next operator, the first third of the stacked projection, tells that call from a user's own.
class EqualAnswers {
 public:
  explicit EqualAnswers(const Bindings& bindings) : bindings_(bindings) {}

  /// Replaces the two tensors on `stack` by the answer. `module` is for the refusal.
  void answer(const c10::OperatorHandle& op, torch::jit::Stack& stack, const std::string& module);
  /// To be told of every other operator before it runs. Throws NotImplementedError after a guess that was none of
  /// multi-head attention's.
  void operator_follows(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    if (guessed_) check_attention(op, stack);
  }
  /// To be told of the end of the body; throws like operator_follows.
  void body_ends();
  void reset() { guessed_ = false; }

 private:
  void check_attention(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  const Bindings& bindings_;
  bool guessed_ = false;
  int64_t width_ = 0;   // of the last guess: size of the last dimension
  std::string module_;  // where the guess was made
};

}  // namespace smp::runtime
