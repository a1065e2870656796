// Comparing, copying and writing back.
#include "examples/transformer_lm/best_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace transformer_lm {

void BestWeights::offer(double loss, const Parameters& parameters) {
  // Written so that NaN, which compares as false with everything, is not kept.
  if (!(loss < loss_) || !std::isfinite(loss)) return;
  loss_ = loss;
  kept_.clear();  // before the copies are made: one set in memory, not two
  for (const auto& [name, parameter] : parameters) kept_.emplace_back(name, parameter.detach().clone());
}

void BestWeights::restore(const Parameters& parameters) const {
  TORCH_CHECK_VALUE(parameters.size() == kept_.size(), "best weights: expected the ", kept_.size(),
                    " parameters that were kept, got ", parameters.size(), ". Offer and restore those of one rank.");
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < kept_.size(); ++i) {
    const auto& [name, weights] = kept_[i];
    TORCH_CHECK_VALUE(parameters[i].first == name, "best weights: expected parameter ", name, ", got ", parameters[i].first,
                      ". Offer and restore those of one rank.");
    at::Tensor(parameters[i].second).copy_(weights);
  }
}

}  // namespace transformer_lm
