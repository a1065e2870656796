// What a step returns: one tensor per microbatch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace smp {

/// One tensor per microbatch, as returned by a step function.
///
/// A step body runs once per microbatch, so each tensor it returns exists `microbatches` times. Every rank of the
/// pipeline holds the same values once the step has returned. The tensors are detached and are the caller's own:
/// arithmetic in place is allowed.
///
///   smp::StepOutput loss = train_step(input, target);   // loss[m] is a scalar
///   double mean = loss.reduce_mean().item<double>();
class StepOutput {
 public:
  StepOutput() = default;
  explicit StepOutput(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {}

  /// Number of microbatches in the step that produced this.
  int64_t size() const { return static_cast<int64_t>(outputs_.size()); }
  /// The tensor of microbatch `m`, 0 <= m < size(). Throws c10::IndexError otherwise.
  const at::Tensor& operator[](int64_t m) const;
  /// All of them, by microbatch.
  const std::vector<at::Tensor>& outputs() const { return outputs_; }

  /// The same: results of a step are detached. For programs that say so.
  StepOutput detach() const { return *this; }

  /// Mean over microbatches; same shape and dtype as one entry. Throws c10::ValueError for integers and bools, whose mean is
  /// none of them (choose: reduce_sum().to(at::kDouble) / size()), and when there is no entry.
  at::Tensor reduce_mean() const;
  /// Sum over microbatches; same shape as one entry and same dtype, but int64 for integers and
  /// bools (the number of true ones). Throws c10::ValueError when there is no entry.
  at::Tensor reduce_sum() const;
  /// Concatenation along the batch dimension: [b, ...] per entry -> [sum of b, ...]. Throws c10::ValueError when there is no
  /// entry, and what at::cat throws for entries that do not fit (scalars: use stack).
  at::Tensor concat(int64_t batch_dim = 0) const;
  /// A new first dimension: [...] per entry -> [size(), ...]. Throws c10::ValueError when there is
  /// no entry, and what at::stack throws for entries of different shapes.
  at::Tensor stack() const;

 private:
  std::vector<at::Tensor> outputs_;
};

}  // namespace smp
