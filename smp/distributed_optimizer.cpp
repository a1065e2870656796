// Which optimizers may run on a part of the parameters, and what they hold.
#include "smp/distributed_optimizer.h"

#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "runtime/delayed/unmade.h"
#include "runtime/device/random.h"
#include "smp/engine/state/model_state.h"
#include "smp/engine/state/optimizer_state.h"

namespace smp::optimizer_internal {
namespace {

using engine::OptimizerMemory;
using torch::optim::Optimizer;

void check_elementwise(const Optimizer& optimizer) {
  TORCH_CHECK_VALUE(dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
                    "DistributedOptimizer: expected an optimizer that updates each element by itself (SGD, Adam, AdamW, "
                    "RMSprop, Adagrad), got LBFGS, whose steps mix all parameters and cannot be split over ranks. "
                    "Use one of those.");
}

// What the model does not have it neither places nor averages, and no state_dict() would know its name.
void check_parameters(const Optimizer& optimizer, const engine::Model& model) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto* named = model.own.find(parameter);
      TORCH_CHECK_VALUE(named != nullptr, "DistributedOptimizer: expected parameters of its model alone, got one of sizes ",
                        parameter.sizes(), " that the model does not have. Each model takes an optimizer of its own: make one "
                        "from net->parameters() of each, and call step() and zero_grad() of all of them.");
    }
  }
}

// Read off torch/csrc/api/src/optim: the tensors in a parameter's state, and those that a step makes and drops.
OptimizerMemory memory_of(const torch::optim::SGDOptions& options) {
  const double decayed = options.weight_decay() != 0, momentum = options.momentum() != 0;
  return {.state = momentum, .workspace = decayed + (options.nesterov() ? momentum : 0)};
}

OptimizerMemory memory_of(const torch::optim::AdamOptions& options) {
  return {.state = options.amsgrad() ? 3.0 : 2.0, .workspace = options.weight_decay() != 0 ? 3.0 : 2.0};
}

OptimizerMemory memory_of(const torch::optim::AdamWOptions& options) {
  return {.state = options.amsgrad() ? 3.0 : 2.0, .workspace = 2};
}

OptimizerMemory memory_of(const torch::optim::RMSpropOptions& options) {
  return {.state = 1.0 + (options.momentum() > 0) + options.centered(),
          .workspace = options.weight_decay() != 0 ? 2.0 : 1.0};
}

OptimizerMemory memory_of(const torch::optim::AdagradOptions& options) {
  return {.state = 1, .workspace = options.weight_decay() != 0 ? 2.0 : 1.0};
}

template <class Options>
OptimizerMemory largest_of_groups(const Optimizer& optimizer) {
  OptimizerMemory largest;
  for (const auto& group : optimizer.param_groups()) {
    const OptimizerMemory memory = memory_of(static_cast<const Options&>(group.options()));
    largest = {std::max(largest.state, memory.state), std::max(largest.workspace, memory.workspace)};
  }
  return largest;
}

OptimizerMemory memory_of(const Optimizer& optimizer) {
  using namespace torch::optim;
  if (dynamic_cast<const SGD*>(&optimizer)) return largest_of_groups<SGDOptions>(optimizer);
  if (dynamic_cast<const Adam*>(&optimizer)) return largest_of_groups<AdamOptions>(optimizer);
  if (dynamic_cast<const AdamW*>(&optimizer)) return largest_of_groups<AdamWOptions>(optimizer);
  if (dynamic_cast<const RMSprop*>(&optimizer)) return largest_of_groups<RMSpropOptions>(optimizer);
  if (dynamic_cast<const Adagrad*>(&optimizer)) return largest_of_groups<AdagradOptions>(optimizer);
  return {.state = 2, .workspace = 3};  // one of the user's own: as much as Adam
}

// Adagrad makes its state in its constructor, so perhaps without values.
void make_delayed_state(Optimizer& optimizer) {
  std::vector<at::Tensor> sums;
  for (auto& [parameter, state] : optimizer.state()) {
    if (auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(state.get())) sums.push_back(adagrad->sum());
  }
  const runtime::GeneratorHold hold;
  runtime::make_values(sums);
}

void drop_state_of_others(Optimizer& optimizer, const DistributedModelBase& model, bool& dropped) {
  if (dropped || !model.partitioned()) return;
  std::unordered_set<const void*> local;
  for (const at::Tensor& parameter : model.local_parameters()) local.insert(parameter.unsafeGetTensorImpl());
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!local.contains(parameter.unsafeGetTensorImpl())) optimizer.state().erase(parameter.unsafeGetTensorImpl());
    }
  }
  make_delayed_state(optimizer);
  dropped = true;
}

}  // namespace

std::shared_ptr<void> adopt(Optimizer& optimizer, const DistributedModelBase& model) {
  check_elementwise(optimizer);
  engine::refuse_in_body("DistributedOptimizer");
  check_parameters(optimizer, engine::ModelAccess::of(model));
  auto adopted = std::make_shared<engine::OptimizerOfModel>(&optimizer, engine::ModelAccess::shared(model));
  engine::conductor("DistributedOptimizer").add_optimizer(memory_of(optimizer), adopted);
  return adopted;
}

namespace {

// Before the first step every rank holds every parameter.
void settle(Progress& progress) {
  if (!progress.pending) return;
  const auto load = std::static_pointer_cast<engine::OptimizerLoad>(std::exchange(progress.pending, nullptr));
  load->apply_state();
}

}  // namespace

bool begin_step(Optimizer& optimizer, const DistributedModelBase& model, Progress& progress) {
  const char* caller = "DistributedOptimizer::step";
  engine::refuse_in_body(caller);
  engine::Conductor& own = engine::conductor(caller);
  if (!own.may_update(engine::ModelAccess::of(model))) return false;
  drop_state_of_others(optimizer, model, progress.has_local_state);
  settle(progress);
  own.count_optimizer_step(optimizer);
  return true;
}

void zero_grad(Optimizer& optimizer) {
  engine::refuse_in_body("DistributedOptimizer::zero_grad");
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) parameter.mutable_grad().reset();
  }
}

OptimizerState state_dict(Optimizer& optimizer, const DistributedModelBase& model, Progress& progress) {
  const char* caller = "DistributedOptimizer::state_dict";
  engine::refuse_in_body(caller);
  settle(progress);
  return engine::gathered_state(engine::conductor(caller), engine::ModelAccess::of(model), optimizer);
}

OptimizerState local_state_dict(Optimizer& optimizer, const DistributedModelBase& model, Progress& progress) {
  const char* caller = "DistributedOptimizer::local_state_dict";
  engine::refuse_in_body(caller);
  settle(progress);
  OptimizerState state = engine::local_state(engine::conductor(caller), engine::ModelAccess::of(model), optimizer);
  for (auto& [parameter, fields] : state.entries) {
    for (auto& [field, tensor] : fields) tensor = tensor.clone();
  }
  return state;
}

void load_state_dict(Optimizer& optimizer, const DistributedModelBase& model, const OptimizerState& state,
                     Progress& progress) {
  const char* caller = "DistributedOptimizer::load_state_dict";
  engine::refuse_in_body(caller);
  engine::refuse_in_join(caller);
  auto load = std::make_shared<engine::OptimizerLoad>(engine::conductor(caller), engine::ModelAccess::of(model), optimizer, state,
                                                      /*own_error=*/"");
  load->apply_options();
  progress.pending = load;
  if (model.partitioned()) settle(progress);
}

}  // namespace smp::optimizer_internal
