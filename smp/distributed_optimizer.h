// An optimizer of LibTorch that updates the parameters living on this rank.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "smp/distributed_model.h"

namespace torch::optim {
class Optimizer;
}

namespace smp {

namespace optimizer_internal {
/// Tells the planner how much memory the optimizer takes. Throws c10::ValueError for optimizers that are not
/// elementwise (LBFGS).
void adopt(const torch::optim::Optimizer& optimizer);
/// Before each step: throws c10::ValueError inside a step body, and frees, once the model is
/// partitioned, what the optimizer made in its constructor for parameters of other ranks (Adagrad).
void begin_step(torch::optim::Optimizer& optimizer, const DistributedModelBase& model,
                bool& has_local_state);
}  // namespace optimizer_internal

/// Owns any elementwise torch::optim optimizer built from the module's parameters.
///
///   smp::DistributedOptimizer optimizer(torch::optim::AdamW(net->parameters(), 1e-3), model);
///   torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.95);
///
/// Parameters of other ranks have no gradient here, so the optimizer passes over them; learning rates and schedulers
/// work on every rank. Make it before the first step, so that the plan counts its state in the memory of each rank.
/// Throws c10::ValueError for LBFGS, whose steps mix all parameters.
template <class Optimizer>
class DistributedOptimizer {
 public:
  DistributedOptimizer(Optimizer optimizer, DistributedModelBase& model)
      : optimizer_(std::make_unique<Optimizer>(std::move(optimizer))), model_(&model) {
    optimizer_internal::adopt(*optimizer_);
  }

  /// Updates the local parameters with the gradients accumulated since zero_grad(). Call it on
  /// every rank after the step function; throws c10::ValueError inside a step body, where there are
  /// no gradients yet.
  void step() {
    optimizer_internal::begin_step(*optimizer_, *model_, has_local_state_);
    optimizer_->step();
  }
  /// Sets the gradients of all parameters to undefined. Throws c10::ValueError inside a step body.
  void zero_grad() { model_->zero_grad(); }
  /// The wrapped optimizer, for schedulers, param_groups and options.
  Optimizer& get() { return *optimizer_; }
  operator torch::optim::Optimizer&() { return *optimizer_; }  // NOLINT: schedulers take it by reference

 private:
  std::unique_ptr<Optimizer> optimizer_;
  DistributedModelBase* model_;
  bool has_local_state_ = false;  // and none of parameters that live elsewhere
};

}  // namespace smp
