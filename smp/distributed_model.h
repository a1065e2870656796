// A module whose operators are spread over the ranks of a pipeline.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "smp/hooks.h"
#include "smp/options.h"
#include "smp/state_dict.h"

namespace torch::nn {
class Module;
}

namespace smp {

namespace engine {
struct Model;
}
struct ModelAccess;

/// What a DistributedModel does that does not depend on the module's type.
class DistributedModelBase {
 public:
  ~DistributedModelBase();
  DistributedModelBase(const DistributedModelBase&) = delete;
  DistributedModelBase& operator=(const DistributedModelBase&) = delete;

  /// Marks `loss` (a scalar made in this body from a model's output) as what is differentiated; the gradient of its mean
  /// over microbatches is what (loss / microbatches).backward() gives. A body may call it several times, for different
  /// losses: their gradients add up, in this order, as if every call but the last kept its graph (retain_graph). As in
  /// LibTorch, every parameter that the loss depends on gets a gradient, of whichever model. Throws c10::Error outside of a
  /// body, for a loss that is no scalar of the body, and for the same loss twice.
  void backward(const at::Tensor& loss);

  /// False until the first step that uses the model, which plans and places its parameters.
  bool partitioned() const;
  /// Parameters that live on this rank (all before the first step), in the module's order; may be
  /// empty. A parameter with several names comes once. Throws c10::ValueError inside a step body.
  std::vector<at::Tensor> local_parameters() const;
  /// The same with their qualified names, of several the first.
  std::vector<std::pair<std::string, at::Tensor>> local_named_parameters() const;
  /// Everything, gathered to every rank of the pipeline; collective over it. Names of one tensor
  /// share one copy. Throws c10::ValueError inside a step body.
  StateDict state_dict() const;
  /// Copies of what lives on this rank (before the first step: everything), marked as partial.
  /// Throws c10::ValueError inside a step body.
  StateDict local_state_dict() const;
  /// Takes over parameters, buffers and, where `state` has them, the counts of steps. Collective
  /// over all ranks, before or after the first step. What the ranks of one pipeline pass is put
  /// together: each the full dictionary, each a part of any split (local_state_dict() of another
  /// number of ranks), or some nothing. Values of dp_rank() 0 count, as at the first step.
  ///
  ///   model.load_state_dict(state);                      // every name must be there
  ///   model.load_state_dict(state, /*strict=*/false);    // what is there, of the names the model has
  ///
  /// Throws c10::ValueError, on every rank alike and before anything changes, with all missing and unexpected names (strict
  /// only) and all wrong shapes and types; for ranks that pass different tensors under one name; inside a step body; for a
  /// model with delayed parameters before the first step of parallelism=auto, which decides where they will be.
  void load_state_dict(const StateDict& state, bool strict = true);

  /// Compares the parameters of all replicas, bit by bit. Collective over all ranks, for about as long as it takes to read
  /// them once. Throws c10::Error on every rank alike, with the first parameter that differs and on which replicas; before
  /// the first step; inside a step body.
  void check_replicas() const;

  /// Replaces the mean over replicas, from the next step on; called in steps that make gradients of the model. On every rank
  /// alike: the next training step is refused where replicas differ, and ends the job where ranks of one pipeline do. An
  /// empty hook: the mean again. Throws c10::ValueError inside a step body.
  void register_comm_hook(CommHook hook);

  /// Puts the module and everything below it into training mode, or evaluation mode; call it on every rank. A step runs in
  /// the mode that its leader, pp_rank() 0, is in when the body is called.
  void train(bool on = true);
  void eval() { train(false); }
  /// Sets every gradient to undefined. Throws c10::ValueError inside a step body.
  void zero_grad();

  // Hooks are called on every rank; they may communicate, but not call a step. An exception in one ends the job: it is the
  // text that every other rank's call throws. All of these throw c10::ValueError for an empty function and inside a step
  // body, and c10::Error where the hook would never be called.

  /// Once, within the first step that uses the model, when the plan exists and before any of its parameters has moved.
  HookHandle register_pre_partition_hook(Hook hook);
  /// Once, within that step, when each rank has its own parameters of the model and before any forward.
  HookHandle register_post_partition_hook(Hook hook);
  /// Once, at the end of that step (SageMaker's name; not register_step_post_hook).
  HookHandle register_post_step_hook(Hook hook);
  /// At the start of every step of the program, whichever models it uses, before its arguments are looked at.
  HookHandle register_step_pre_hook(Hook hook);
  /// At the end of every step that is not refused, when its results are there.
  HookHandle register_step_post_hook(Hook hook);

  /// The partition as text (the table printed at the first step that uses the model) and JSON; empty before it. The text
  /// ends with those of this rank's stages that stay on autograd so far, and why.
  std::string plan_text() const;
  std::string plan_json() const;
  /// Predicted seconds of that step, with its bodies and the averaging of gradients, and predicted peak bytes by pipeline
  /// rank.
  double predicted_step_s() const;
  std::vector<int64_t> predicted_peak_bytes() const;

 protected:
  DistributedModelBase(std::shared_ptr<torch::nn::Module> module, const ModelOptions& options);
  /// Throws c10::Error outside of a step body.
  void check_in_body() const;

 private:
  friend struct ModelAccess;

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<engine::Model> model_;
};

/// Wraps an unmodified module. A program may have several, made in the same order on every rank; one body may call
/// several of them. Each is placed by the first step that uses it. Throws c10::ValueError for a module that an earlier
/// model, gone by now, has spread over a pipeline, and for two tensors of one name (ModelOptions::name).
///
///   auto net = Net();                        // any torch::nn::Module, in a holder or shared_ptr
///   smp::DistributedModel model(net);
///   auto train_step = smp::step([&](at::Tensor data, at::Tensor target) {
///     auto loss = torch::nll_loss(model(data), target);
///     model.backward(loss);
///     return loss;
///   });
///
/// The rule: call it inside step bodies only. The module keeps all its parameter objects on every rank; after the first
/// step the data of those that live on other ranks are released, and accessing them throws an error that names the
/// owner. An optimizer built from net->parameters() before or after wrapping keeps working.
template <class Module>
class DistributedModel : public DistributedModelBase {
 public:
  explicit DistributedModel(std::shared_ptr<Module> module, const ModelOptions& options = {})
      : DistributedModelBase(module, options), typed_(std::move(module)) {}
  template <class Holder>
    requires requires(Holder holder) {
      typename Holder::ContainedType;
      holder.ptr();
    }
  explicit DistributedModel(const Holder& holder, const ModelOptions& options = {})
      : DistributedModel(holder.ptr(), options) {}

  /// Runs forward on this body's tensors: records it, or recognises it.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    check_in_body();
    return typed_->forward(std::forward<Args>(args)...);
  }

  const std::shared_ptr<Module>& module() const { return typed_; }

 private:
  std::shared_ptr<Module> typed_;
};

/// For smp's own sources: what the engine calls a model.
struct ModelAccess {
  static engine::Model& of(const DistributedModelBase& model) { return *model.model_; }
  static const std::shared_ptr<engine::Model>& shared(const DistributedModelBase& model) { return model.model_; }
};

template <class Module>
DistributedModel(std::shared_ptr<Module>, const ModelOptions& = {}) -> DistributedModel<Module>;
template <class Holder>
  requires requires { typename Holder::ContainedType; }
DistributedModel(const Holder&, const ModelOptions& = {}) -> DistributedModel<typename Holder::ContainedType>;

}  // namespace smp
