// An optimizer of LibTorch that updates the parameters living on this rank.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "smp/distributed_model.h"
#include "smp/optimizer_state.h"

namespace torch::optim {
class Optimizer;
}

namespace smp {

namespace engine {
struct Optimizer;
}

namespace optimizer_internal {
using Handle = std::shared_ptr<engine::Optimizer>;
/// Tells the planner how much memory the optimizer takes. Throws c10::ValueError for optimizers that are not elementwise
/// (LBFGS) and for parameters that the model does not have. The optimizer counts as alive as long as what is returned is.
Handle adopt(torch::optim::Optimizer& optimizer, const DistributedModelBase& model);
/// Before each step: throws c10::ValueError inside a step body; false or c10::Error where numbers are not finite, as
/// Config::nonfinite says.
bool begin_step(const Handle& optimizer);
/// Calls `step`, the optimizer's own; watches the first ones of a class that is not LibTorch's.
void run_step(const Handle& optimizer, const std::function<void()>& step);
/// DistributedOptimizer's functions of these names.
void zero_grad(const Handle& optimizer);
OptimizerState state_dict(const Handle& optimizer);
OptimizerState local_state_dict(const Handle& optimizer);
void load_state_dict(const Handle& optimizer, const OptimizerState& state);
}  // namespace optimizer_internal

struct OptimizerAccess;

/// Owns any elementwise torch::optim optimizer built from the module's parameters.
///
///   smp::DistributedOptimizer optimizer(torch::optim::AdamW(net->parameters(), 1e-3), model);
///   torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.95);
///
/// Parameters of other ranks have no gradient here, so the optimizer passes over them; learning rates and schedulers
/// work on every rank. Make it before the first step, so that the plan counts its state in the memory of each rank.
/// A model may have several, each over some of its parameters; a program of several models makes one for each model.
/// Throws c10::ValueError for parameters of another model, and for LBFGS, whose steps mix all parameters.
template <class Optimizer>
class DistributedOptimizer {
 public:
  DistributedOptimizer(Optimizer optimizer, DistributedModelBase& model)
      : optimizer_(std::make_unique<Optimizer>(std::move(optimizer))),
        adopted_(optimizer_internal::adopt(*optimizer_, model)) {}

  /// Updates the local parameters with the gradients accumulated since zero_grad(). Call it on every rank after the step
  /// function: where some have called it more often than others, the next training step, state_dict(), save_state() and the
  /// end of a join throw c10::ValueError, until load_state_dict() of the model makes all ranks equal again. Where options or
  /// parameter groups differ between ranks, the same throw until they do not. Throws c10::ValueError inside a step body,
  /// where there are no gradients yet.
  ///
  /// Where a loss or a gradient of the model held NaN or infinity at the end of the last training
  /// step, all ranks throw c10::Error and none has changed anything; with Config::nonfinite = kSkip
  /// all return without an update. Losses count until gradients are cleared.
  ///
  /// The first two updates of a class that is not LibTorch's are watched where there are several stages: if what comes from
  /// several parameters goes into one, a norm over all of them say, all ranks throw c10::ValueError naming the operator, and
  /// parameters, gradients and state are what they were.
  void step() {
    if (!optimizer_internal::begin_step(adopted_)) return;
    optimizer_internal::run_step(adopted_, [this] { optimizer_->step(); });
  }
  /// Sets the gradients of its parameters to undefined; DistributedModel::zero_grad() those of the whole model. Throws
  /// c10::ValueError inside a step body.
  void zero_grad() { optimizer_internal::zero_grad(adopted_); }

  /// Options and state of all parameters, gathered to every rank of the pipeline; collective over it. SGD, Adam, AdamW,
  /// RMSprop and Adagrad of LibTorch; throws c10::ValueError for others and inside a step body.
  ///
  /// Between load_state_dict() before the first step and the first step() this and local_state_dict() bring what was loaded
  /// to its ranks: collective over all ranks then, and refused by c10::ValueError in the loop of smp::join.
  OptimizerState state_dict() { return optimizer_internal::state_dict(adopted_); }
  /// Options of all parameters and copies of the state of those on this rank, marked as partial.
  OptimizerState local_state_dict() { return optimizer_internal::local_state_dict(adopted_); }
  /// Takes over options (learning rates too) and state. Collective over all ranks, before or after the first step; what the
  /// ranks pass is put together as in DistributedModel::load_state_dict(). Before the first step the options change at once,
  /// and the state waits for the placement: no rank ever holds more than it was given (with parallelism=auto all ranks take
  /// all of it over at once, since groups change with the first step). A learning-rate scheduler keeps its
  /// own count: step it as often as it had been stepped, then load. Throws c10::ValueError, on every rank alike and before
  /// anything changes, when kind, groups, names, shapes or types are not those of this optimizer.
  void load_state_dict(const OptimizerState& state) { optimizer_internal::load_state_dict(adopted_, state); }
  /// The wrapped optimizer, for schedulers, param_groups and options.
  Optimizer& get() { return *optimizer_; }
  operator torch::optim::Optimizer&() { return *optimizer_; }  // NOLINT: schedulers take it by reference

 private:
  friend struct OptimizerAccess;

  std::unique_ptr<Optimizer> optimizer_;
  optimizer_internal::Handle adopted_;  // goes before optimizer_
};

/// For smp's own sources: what the engine calls an optimizer.
struct OptimizerAccess {
  template <class Optimizer>
  static const optimizer_internal::Handle& of(const DistributedOptimizer<Optimizer>& optimizer) {
    return optimizer.adopted_;
  }
};

}  // namespace smp
