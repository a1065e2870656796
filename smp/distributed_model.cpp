// DistributedModel apart from the module's type.
#include "smp/distributed_model.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include "partitioner/report/partition_table.h"
#include "partitioner/report/partition_table_io.h"
#include "smp/engine/conductor.h"
#include "smp/engine/state/model_state.h"

namespace smp {

using engine::conductor;
using partitioner::ValueKind;

namespace {

// What went wrong with placement by hand before the first step, told while it can still be put
// right.
void check_placement(engine::Context& context, bool is_placed) {
  TORCH_CHECK_VALUE(
      *context.open_guards == 0, "PartitionGuard: expected all guards to end before the step, got ",
      *context.open_guards,
      " alive. Put the guard and the making of the modules into braces of their own.");
  if (is_placed) return;
  const int64_t lost = context.manual_placement.take_lost();
  if (lost == 0) return;
  context.logger.warning(
      "set_partition: expected the placed tensors to live until the first step, got " +
      std::to_string(lost) +
      " of them deleted. Their successors are placed by the planner; call "
      "set_partition again after a module was replaced or cloned.");
}

void check_options(const ModelOptions& options, const engine::Context& context) {
  TORCH_CHECK_VALUE(options.bucket_cap_mb >= 0, "DistributedModel: expected bucket_cap_mb >= 0, got ",
                    options.bucket_cap_mb, ". Give the size of a bucket in MiB, or 0 for Config::bucket_cap_mb.");
  TORCH_CHECK_VALUE(options.backward_passes_per_step >= 1, "DistributedModel: expected backward_passes_per_step >= 1, got ",
                    options.backward_passes_per_step, ".");
  if (context.conductor == nullptr) return;
  for (const auto& other : context.conductor->models().all()) {
    TORCH_CHECK_VALUE(other->reduction.averages_microbatches == options.average_grads_across_microbatches,
                      "DistributedModel: expected one average_grads_across_microbatches for all models, got ",
                      options.average_grads_across_microbatches, " after another one. One loss may reach several models.");
  }
}

void set_reduction(engine::Reduction& reduction, const ModelOptions& options, const Config& config) {
  reduction.overlap = options.overlapping_allreduce && config.overlapping_allreduce;
  reduction.broadcasts_buffers = options.broadcast_buffers && config.broadcast_buffers;
  reduction.averages_microbatches = options.average_grads_across_microbatches;
  reduction.bucket_bytes = (options.bucket_cap_mb > 0 ? options.bucket_cap_mb : config.bucket_cap_mb) * (int64_t{1} << 20);
  reduction.passes_per_step = options.backward_passes_per_step;
}

}  // namespace

DistributedModelBase::DistributedModelBase(std::shared_ptr<torch::nn::Module> module, const ModelOptions& options)
    : module_(std::move(module)) {
  auto& own = engine::context("DistributedModel");
  TORCH_CHECK_VALUE(module_ != nullptr, "DistributedModel: expected a module, got a null pointer.");
  engine::refuse_in_body("DistributedModel");
  check_options(options, own);
  if (own.conductor == nullptr) own.conductor = std::make_shared<engine::Conductor>(own);
  model_ = own.conductor->add_model(module_, options.name);
  set_reduction(model_->reduction, options, own.config);
}

DistributedModelBase::~DistributedModelBase() {
  auto* own = engine::try_context();
  if (own == nullptr || own->conductor == nullptr) return;
  own->conductor->remove_model(*model_);
  if (own->conductor->models().all().empty()) own->conductor.reset();
}

void DistributedModelBase::check_in_body() const {
  const auto* body = conductor("DistributedModel").body_in_progress();
  TORCH_CHECK(body != nullptr,
              "DistributedModel: expected a call inside a step body, got one outside. Wrap the code that calls the "
              "model: auto train_step = smp::step([&](at::Tensor data) { ... });");
  check_placement(conductor("DistributedModel").context(), partitioned());
}

void DistributedModelBase::backward(const at::Tensor& loss) {
  auto* body = conductor("backward").body_in_progress();
  TORCH_CHECK(
      body != nullptr,
      "backward: expected a call inside a step body, got one outside. Move it into the body, "
      "after the loss: auto train_step = smp::step([&](at::Tensor data) { ...; "
      "model.backward(loss); });");
  body->mark_backward(loss);
}

bool DistributedModelBase::partitioned() const { return model_->first_program != nullptr; }

std::vector<std::pair<std::string, at::Tensor>> DistributedModelBase::local_named_parameters() const {
  engine::refuse_in_body("local_named_parameters",
                         "The body sees all parameters: use those of the module itself, "
                         "module()->named_parameters().");
  const engine::Models& models = conductor("local_named_parameters").models();
  std::vector<std::pair<std::string, at::Tensor>> local;
  for (const auto& named : model_->own.tensors()) {
    if (named.kind == ValueKind::kParameter && models.is_here(named.tensor)) local.emplace_back(named.name, named.tensor);
  }
  return local;
}

std::vector<at::Tensor> DistributedModelBase::local_parameters() const {
  engine::refuse_in_body(
      "local_parameters",
      "The body sees all parameters: use those of the module itself, module()->parameters().");
  std::vector<at::Tensor> tensors;
  for (auto& [name, tensor] : local_named_parameters()) tensors.push_back(std::move(tensor));
  return tensors;
}

StateDict DistributedModelBase::state_dict() const {
  engine::refuse_in_body("state_dict");
  return engine::gathered_state(conductor("state_dict"), *model_);
}

StateDict DistributedModelBase::local_state_dict() const {
  engine::refuse_in_body("local_state_dict");
  StateDict state = engine::local_state(conductor("local_state_dict"), *model_);
  for (StateDict::Entry& entry : state.entries) entry.tensor = entry.tensor.clone();
  return state;
}

void DistributedModelBase::load_state_dict(const StateDict& state, bool strict) {
  engine::refuse_in_body("load_state_dict");
  engine::refuse_in_join("load_state_dict");
  engine::ModelLoad(conductor("load_state_dict"), *model_, state, strict, /*own_error=*/"").apply();
}

void DistributedModelBase::register_comm_hook(CommHook hook) {
  engine::refuse_in_body("register_comm_hook");
  engine::refuse_in_join("register_comm_hook");
  model_->reduction.hook = std::move(hook);
  ++model_->reduction.num_hooks;
  model_->reduction.reducer.reset();
}

void DistributedModelBase::train(bool on) { module_->train(on); }

void DistributedModelBase::zero_grad() {
  engine::refuse_in_body("zero_grad");
  for (const at::Tensor& parameter : module_->parameters()) {
    at::Tensor handle = parameter;
    handle.mutable_grad().reset();
  }
}

namespace {

HookHandle add_hook(const char* caller, const engine::Model& model, engine::Moment moment, Hook hook) {
  engine::refuse_in_body(caller);
  TORCH_CHECK_VALUE(hook != nullptr, caller, ": expected a function, got an empty one.");
  const bool is_about_partition =
      moment == engine::Moment::kBeforePartition || moment == engine::Moment::kAfterPartition;
  TORCH_CHECK(!is_about_partition || model.first_program == nullptr, caller, ": expected a call before the first step, ",
              "which partitions the model, got one after it. The hook would never be called.");
  TORCH_CHECK(moment != engine::Moment::kAfterFirstStep || !model.hooks->has_stepped(), caller, ": expected a call before ",
              "the first step has ended, got one after it. register_step_post_hook is called after every step.");
  return {model.hooks, model.hooks->add(moment, std::move(hook))};
}

}  // namespace

HookHandle DistributedModelBase::register_pre_partition_hook(Hook hook) {
  return add_hook("register_pre_partition_hook", *model_, engine::Moment::kBeforePartition, std::move(hook));
}
HookHandle DistributedModelBase::register_post_partition_hook(Hook hook) {
  return add_hook("register_post_partition_hook", *model_, engine::Moment::kAfterPartition, std::move(hook));
}
HookHandle DistributedModelBase::register_post_step_hook(Hook hook) {
  return add_hook("register_post_step_hook", *model_, engine::Moment::kAfterFirstStep, std::move(hook));
}
HookHandle DistributedModelBase::register_step_pre_hook(Hook hook) {
  return add_hook("register_step_pre_hook", *model_, engine::Moment::kBeforeStep, std::move(hook));
}
HookHandle DistributedModelBase::register_step_post_hook(Hook hook) {
  return add_hook("register_step_post_hook", *model_, engine::Moment::kAfterStep, std::move(hook));
}

std::string DistributedModelBase::plan_text() const {
  const auto& program = model_->first_program;
  if (program == nullptr) return "";
  std::string text = partitioner::partition_table(program->graph, program->plan);
  for (const auto& [index, stage] : program->rank_program.stages) {
    const std::string reason = stage->report().stays_on_autograd;
    if (!reason.empty()) text += "stage " + std::to_string(index) + " stays on autograd: " + reason + "\n";
  }
  return text;
}

std::string DistributedModelBase::plan_json() const {
  const auto& program = model_->first_program;
  return program == nullptr ? "" : partitioner::partition_table_json(program->graph, program->plan);
}

double DistributedModelBase::predicted_step_s() const {
  const auto& program = model_->first_program;
  return program == nullptr ? 0 : program->plan.predicted_step_us * 1e-6;
}

std::vector<int64_t> DistributedModelBase::predicted_peak_bytes() const {
  const auto& program = model_->first_program;
  return program == nullptr ? std::vector<int64_t>{} : program->plan.predicted_peak_bytes;
}

}  // namespace smp
