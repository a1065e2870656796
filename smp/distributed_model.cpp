// DistributedModel apart from the module's type.
#include "smp/distributed_model.h"

#include <torch/nn/module.h>

#include "smp/engine/engine.h"
#include "smp/module_view.h"

namespace smp {

using engine::Moment;

DistributedModelBase::DistributedModelBase(std::shared_ptr<torch::nn::Module> module, const ModelOptions& options)
    : module_(std::move(module)), model_(engine::add_model(module_ ? view_of(module_) : nullptr, options)) {}

DistributedModelBase::~DistributedModelBase() { engine::remove_model(*model_); }

void DistributedModelBase::check_in_body() const { engine::check_in_body(*model_); }

void DistributedModelBase::backward(const at::Tensor& loss) { engine::mark_backward(loss); }

bool DistributedModelBase::partitioned() const { return engine::is_partitioned(*model_); }

std::vector<std::pair<std::string, at::Tensor>> DistributedModelBase::local_named_parameters() const {
  return engine::local_named_parameters(
      "local_named_parameters", *model_,
      "The body sees all parameters: use those of the module itself, module()->named_parameters().");
}

std::vector<at::Tensor> DistributedModelBase::local_parameters() const {
  std::vector<at::Tensor> tensors;
  for (auto& [name, tensor] : engine::local_named_parameters(
           "local_parameters", *model_,
           "The body sees all parameters: use those of the module itself, module()->parameters().")) {
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

StateDict DistributedModelBase::state_dict() const { return engine::state_dict(*model_); }

void DistributedModelBase::check_replicas() const { engine::check_replicas(*model_); }
StateDict DistributedModelBase::local_state_dict() const { return engine::local_state_dict(*model_); }

void DistributedModelBase::load_state_dict(const StateDict& state, bool strict) {
  engine::load_state_dict(*model_, state, strict);
}

void DistributedModelBase::register_comm_hook(CommHook hook) { engine::register_comm_hook(*model_, std::move(hook)); }

void DistributedModelBase::train(bool on) { module_->train(on); }

void DistributedModelBase::zero_grad() { engine::zero_grad(*model_); }

HookHandle DistributedModelBase::register_pre_partition_hook(Hook hook) {
  return engine::add_hook("register_pre_partition_hook", *model_, Moment::kBeforePartition, std::move(hook));
}
HookHandle DistributedModelBase::register_post_partition_hook(Hook hook) {
  return engine::add_hook("register_post_partition_hook", *model_, Moment::kAfterPartition, std::move(hook));
}
HookHandle DistributedModelBase::register_post_step_hook(Hook hook) {
  return engine::add_hook("register_post_step_hook", *model_, Moment::kAfterFirstStep, std::move(hook));
}
HookHandle DistributedModelBase::register_step_pre_hook(Hook hook) {
  return engine::add_hook("register_step_pre_hook", *model_, Moment::kBeforeStep, std::move(hook));
}
HookHandle DistributedModelBase::register_step_post_hook(Hook hook) {
  return engine::add_hook("register_step_post_hook", *model_, Moment::kAfterStep, std::move(hook));
}

std::string DistributedModelBase::plan_text() const { return engine::plan_text(*model_); }
std::string DistributedModelBase::plan_json() const { return engine::plan_json(*model_); }
double DistributedModelBase::predicted_step_s() const { return engine::predicted_step_s(*model_); }
std::vector<int64_t> DistributedModelBase::predicted_peak_bytes() const { return engine::predicted_peak_bytes(*model_); }

}  // namespace smp
