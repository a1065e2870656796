// The weights with the lowest validation loss, kept in memory while training goes on.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace transformer_lm {

/// Copies of this rank's parameters only: nothing is gathered, so no rank needs memory for more than its part of the model.
///
///   BestWeights best;
///   best.offer(valid_loss, model.local_named_parameters());   // after every epoch
///   if (!best.is_empty()) best.restore(model.local_named_parameters());
class BestWeights {
 public:
  using Parameters = std::vector<std::pair<std::string, at::Tensor>>;

  /// Copies `parameters` if `loss` is below all that came before. A loss that is not finite is
  /// never the best, the first one neither.
  void offer(double loss, const Parameters& parameters);

  /// True until a loss was kept.
  bool is_empty() const { return loss_ == std::numeric_limits<double>::infinity(); }
  /// The lowest loss; infinity when is_empty().
  double loss() const { return loss_; }

  /// Writes the copies into `parameters`: those that were offered, in the same order. Throws c10::ValueError for others.
  void restore(const Parameters& parameters) const;

 private:
  double loss_ = std::numeric_limits<double>::infinity();
  Parameters kept_;
};

}  // namespace transformer_lm
