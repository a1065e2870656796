// The optimizer that --optimizer names, at the rate that --lr gives.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <tuple>
#include <utility>
#include <vector>

#include "examples/common/flags.h"

namespace examples {

struct OptimizerOptions {
  double adam_beta1 = 0.9;  // momentum of Adam and AdamW
};

/// Calls use(make), where make(parameters) is a new optimizer over them. Each kind is a type of its
/// own, so `use` is a generic lambda:
///
///   examples::with_optimizer(flags, [&](auto make) { train(make(net->parameters())); });
template <class Use>
void with_optimizer(const Flags& flags, const Use& use, const OptimizerOptions& options = {}) {
  using Parameters = std::vector<at::Tensor>;
  using torch::optim::AdamOptions, torch::optim::AdamWOptions;
  const double lr = flags.lr;
  const std::tuple<double, double> betas(options.adam_beta1, 0.999);
  switch (flags.optimizer) {
    case Optimizer::kSgd:
      return use([lr](Parameters all) { return torch::optim::SGD(std::move(all), lr); });
    case Optimizer::kAdam:
      return use([=](Parameters all) { return torch::optim::Adam(std::move(all), AdamOptions(lr).betas(betas)); });
    case Optimizer::kAdamW:
      return use([=](Parameters all) { return torch::optim::AdamW(std::move(all), AdamWOptions(lr).betas(betas)); });
  }
}

}  // namespace examples
