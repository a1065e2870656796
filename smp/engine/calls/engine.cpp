// Models and optimizers, checked and handed on.
#include "smp/engine/engine.h"

#include <c10/util/Exception.h>

#include <utility>

#include "partitioner/report/partition_table.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/places.h"
#include "runtime/delayed/construction.h"
#include "runtime/device/random.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/libtorch/unmade.h"
#include "runtime/watch/stack.h"
#include "smp/engine/checkpoint/model_state.h"
#include "smp/engine/context/call.h"
#include "smp/engine/optimizers/optimizer_settings.h"
#include "smp/engine/optimizers/optimizer_state.h"
#include "smp/engine/optimizers/parameter_origins.h"
#include "smp/engine/optimizers/watched_update.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/engine/step/nonfinite.h"

namespace smp::engine {

using partitioner::ValueKind;

namespace {

// What went wrong with placement by hand before the first step, told while it can still be put right.
void check_placement(Context& context, bool is_placed) {
  TORCH_CHECK_VALUE(*context.manual_placement.open_guards() == 0,
                    "PartitionGuard: expected all guards to end before the step, got ",
                    context.manual_placement.open_guards()->load(),
                    " alive. Put the guard and the making of the modules into braces of their own.");
  if (is_placed) return;
  const int64_t lost = context.manual_placement.take_lost();
  if (lost == 0) return;
  context.logger.warning("set_partition: expected the placed tensors to live until the first step, got " +
                         std::to_string(lost) +
                         " of them deleted. Their successors are placed by the planner; call set_partition again after a "
                         "module was replaced or cloned.");
}

void check_options(const ModelOptions& options, const Context& context) {
  TORCH_CHECK_VALUE(options.bucket_cap_mb >= 0, "DistributedModel: expected bucket_cap_mb >= 0, got ", options.bucket_cap_mb,
                    ". Give the size of a bucket in MiB, or 0 for Config::bucket_cap_mb.");
  TORCH_CHECK_VALUE(options.backward_passes_per_step >= 1, "DistributedModel: expected backward_passes_per_step >= 1, got ",
                    options.backward_passes_per_step, ".");
  if (context.rank_state == nullptr) return;
  for (const auto& other : context.rank_state->models.all()) {
    TORCH_CHECK_VALUE(other->reduction.averages_microbatches == options.average_grads_across_microbatches,
                      "DistributedModel: expected one average_grads_across_microbatches for all models, got ",
                      options.average_grads_across_microbatches, " after another one. One loss may reach several models.");
  }
}

void set_reduction(Reduction& reduction, const ModelOptions& options, const Config& config) {
  reduction.overlap = options.overlapping_allreduce && config.overlapping_allreduce;
  reduction.broadcasts_buffers = options.broadcast_buffers && config.broadcast_buffers;
  reduction.averages_microbatches = options.average_grads_across_microbatches;
  reduction.bucket_bytes = (options.bucket_cap_mb > 0 ? options.bucket_cap_mb : config.bucket_cap_mb) * (int64_t{1} << 20);
  reduction.passes_per_step = options.backward_passes_per_step;
}

// What the model does not have it neither places nor averages, and no state_dict() would know its name.
void check_parameters(const OptimizerView& optimizer, const Model& model) {
  for (const OptimizerGroup& group : optimizer.groups()) {
    for (const at::Tensor& parameter : group.parameters) {
      const auto* named = model.own.find(parameter);
      TORCH_CHECK_VALUE(named != nullptr, "DistributedOptimizer: expected parameters of its model alone, got one of sizes ",
                        parameter.sizes(),
                        " that the model does not have. Each model takes an optimizer of its own: make one from "
                        "net->parameters() of each, and call step() and zero_grad() of all of them.");
    }
  }
}

std::vector<std::pair<std::string, at::Tensor>> local_tensors(const char* caller, const Model& model, ValueKind kind,
                                                              std::string_view fix) {
  refuse_in_body(caller, fix);
  const Models& models = rank_state(caller).models;
  std::vector<std::pair<std::string, at::Tensor>> local;
  for (const auto& named : model.own.tensors()) {
    if (named.kind == kind && models.is_here(named.tensor)) local.emplace_back(named.name, named.tensor);
  }
  return local;
}

// The state that a call asks for: a load that waits for the first step reaches all ranks now, those of other replicas too.
const RankState& rank_with_state(Optimizer& optimizer, const char* caller) {
  refuse_in_body(caller);
  if (optimizer.pending) refuse_in_join(caller);
  RankState& own = rank_state(caller);
  take_over_loaded(own, optimizer);
  return own;
}

}  // namespace

std::shared_ptr<Model> add_model(std::shared_ptr<const ModelView> view, const ModelOptions& options) {
  Context& own = context("DistributedModel");
  TORCH_CHECK_VALUE(view != nullptr, "DistributedModel: expected a module, got a null pointer.");
  refuse_in_body("DistributedModel");
  check_options(options, own);
  if (own.rank_state == nullptr) own.rank_state = std::make_shared<RankState>(own);
  auto model = own.rank_state->models.add(std::move(view), options.name);
  set_reduction(model->reduction, options, own.config);
  return model;
}

void remove_model(const Model& model) {
  Context* own = try_context();
  if (own == nullptr || own->rank_state == nullptr) return;
  RankState& rank = *own->rank_state;
  rank.models.remove(model);
  rank.captures.clear();
  rank.programs.clear();
  forget_without_models(*own);
}

void check_in_body(const Model& model) {
  Context& own = rank_state("DistributedModel").context;
  TORCH_CHECK(own.body_in_progress != nullptr,
              "DistributedModel: expected a call inside a step body, got one outside. Wrap the code that calls the model: "
              "auto train_step = smp::step([&](at::Tensor data) { ... });");
  check_placement(own, model.is_partitioned());
}

void mark_backward(const at::Tensor& loss) {
  const Context& own = rank_state("backward").context;
  TORCH_CHECK(own.body_in_progress != nullptr,
              "backward: expected a call inside a step body, got one outside. Move it into the body, after the loss: auto "
              "train_step = smp::step([&](at::Tensor data) { ...; model.backward(loss); });");
  own.body_in_progress->mark_backward(loss);
}

bool is_in_body() {
  const Context* own = try_context();
  return own != nullptr && own->body_in_progress != nullptr;
}

bool is_capturing() {
  const Context* own = try_context();
  return own != nullptr && own->body_in_progress != nullptr &&
         !c10::impl::tls_is_dispatch_key_excluded(runtime::kCaptureKey);
}

bool look_at(const at::Tensor& tensor, const std::function<void(const at::Tensor& content)>& look) {
  if (runtime::ConstructionScope::is_open() && runtime::is_unmade(tensor)) {
    const c10::impl::ExcludeDispatchKeyGuard off(runtime::kCaptureKey);
    const runtime::GeneratorHold hold;
    look(runtime::value_of(tensor));
    return true;
  }
  if (!is_capturing()) {  // in a stage that runs while its body waits for a value, tensors hold what they hold
    if (runtime::as_ghost(tensor) != nullptr) runtime::refuse_stale_ghost("a look at a tensor", "");
    return false;
  }
  const c10::impl::ExcludeDispatchKeyGuard off(runtime::kCaptureKey);
  const at::Tensor content = try_context()->body_in_progress->look_at(tensor);
  if (content.defined()) look(content);
  return content.defined();
}

void autograd_called() {
  if (is_capturing()) try_context()->body_in_progress->engine_called();  // else within smp::opaque, on real tensors
}

bool is_partitioned(const Model& model) { return model.is_partitioned(); }

std::vector<std::pair<std::string, at::Tensor>> local_named_parameters(const char* caller, const Model& model,
                                                                       std::string_view fix) {
  return local_tensors(caller, model, ValueKind::kParameter, fix);
}

std::vector<std::pair<std::string, at::Tensor>> local_named_buffers(const char* caller, const Model& model,
                                                                    std::string_view fix) {
  return local_tensors(caller, model, ValueKind::kBuffer, fix);
}

StateDict state_dict(const Model& model) {
  refuse_in_body("state_dict");
  const RankState& own = rank_state("state_dict");
  return in_call(own.context, "state_dict", runtime::GroupKind::kPipeline, [&] { return gathered_state(own, model); });
}

StateDict local_state_dict(const Model& model) {
  refuse_in_body("local_state_dict");
  StateDict state = local_state(rank_state("local_state_dict"), model);
  for (StateDict::Entry& entry : state.entries) entry.tensor = entry.tensor.clone();
  return state;
}

void load_state_dict(Model& model, const StateDict& state, bool strict) {
  refuse_in_body("load_state_dict");
  refuse_in_join("load_state_dict");
  RankState& own = rank_state("load_state_dict");
  in_call(own.context, "load_state_dict", runtime::GroupKind::kWorld,
          [&] { ModelLoad(own, model, state, strict, /*own_error=*/"").apply(); });
}

void zero_grad(const Model& model) {
  refuse_in_body("zero_grad");
  for (const auto& named : model.own.tensors()) {
    at::Tensor tensor = named.tensor;
    if (named.kind == ValueKind::kParameter) tensor.mutable_grad().reset();
  }
}

void register_comm_hook(Model& model, CommHook hook) {
  refuse_in_body("register_comm_hook");
  refuse_in_join("register_comm_hook");
  model.reduction.hook = std::move(hook);
  ++model.reduction.num_hooks;
  model.reduction.reducer.reset();
}

HookHandle add_hook(const char* caller, const Model& model, Moment moment, Hook hook) {
  refuse_in_body(caller);
  TORCH_CHECK_VALUE(hook != nullptr, caller, ": expected a function, got an empty one.");
  const bool is_about_partition = moment == Moment::kBeforePartition || moment == Moment::kAfterPartition;
  TORCH_CHECK(!is_about_partition || !model.is_partitioned(), caller, ": expected a call before the first step, ",
              "which partitions the model, got one after it. The hook would never be called.");
  TORCH_CHECK(moment != Moment::kAfterFirstStep || !model.hooks->has_stepped(), caller, ": expected a call before ",
              "the first step has ended, got one after it. register_step_post_hook is called after every step.");
  return {model.hooks, model.hooks->add(moment, std::move(hook))};
}

void begin_no_sync(Model& model) {
  refuse_in_body("NoSync", "Put the guard around the call of the step function.");
  ++model.reduction.num_no_sync;
}

void end_no_sync(Model& model) { --model.reduction.num_no_sync; }

std::string plan_text(const Model& model) {
  const auto& program = model.first_program;
  if (program == nullptr) return "";
  std::string text = partitioner::partition_table(program->graph, program->plan);
  const Context* own = try_context();
  const bool is_asked_for = own != nullptr && own->config.stage == StageKind::kAutograd;
  for (const auto& [index, stage] : program->rank_program.stages) {
    const std::string reason = is_asked_for ? "stage: autograd" : stage->report().stays_on_autograd;
    if (!reason.empty()) text += "stage " + std::to_string(index) + " stays on autograd: " + reason + "\n";
  }
  return text;
}

std::string plan_json(const Model& model) {
  const auto& program = model.first_program;
  return program == nullptr ? "" : partitioner::partition_table_json(program->graph, program->plan);
}

double predicted_step_s(const Model& model) {
  const auto& program = model.first_program;
  return program == nullptr ? 0 : program->plan.predicted_step_us * 1e-6;
}

std::vector<int64_t> predicted_peak_bytes(const Model& model) {
  const auto& program = model.first_program;
  return program == nullptr ? std::vector<int64_t>{} : program->plan.predicted_peak_bytes;
}

std::pair<std::string, std::string> timeline_drawing() {
  const TimelineDrawing& drawing = context("timeline").timeline_drawing;
  return {drawing.text, drawing.svg};
}

bool has_values(const at::Tensor& tensor) { return !runtime::is_unmade(tensor); }

void make_values(const std::vector<at::Tensor>& tensors) {
  refuse_in_body("initialize_parameters");
  const runtime::GeneratorHold hold;
  runtime::make_values(tensors);
}

std::shared_ptr<Optimizer> add_optimizer(std::unique_ptr<OptimizerView> view, const std::shared_ptr<Model>& model) {
  refuse_in_body("DistributedOptimizer");
  check_parameters(*view, *model);
  RankState& own = rank_state("DistributedOptimizer");
  own.programs.add_optimizer(view->memory());
  std::erase_if(own.optimizers, [](const auto& known) { return known.expired(); });
  auto optimizer = std::make_shared<Optimizer>(Optimizer{.view = std::move(view), .model = model});
  own.optimizers.push_back(optimizer);
  return optimizer;
}

std::shared_ptr<Optimizer> stand_in(std::unique_ptr<OptimizerView> view, const Optimizer& optimizer) {
  return std::make_shared<Optimizer>(Optimizer{.view = std::move(view), .model = optimizer.model, .loads_at_once = true});
}

bool begin_update(Optimizer& optimizer, bool has_finite_gradients) {
  const char* caller = "DistributedOptimizer::step";
  refuse_in_body(caller);
  RankState& own = rank_state(caller);
  if (!may_update(own, *optimizer.model, has_finite_gradients)) return false;
  if (!optimizer.has_local_state && optimizer.model->is_partitioned()) {
    keep_local_state(own, optimizer);
    optimizer.has_local_state = true;
  }
  take_over_loaded(own, optimizer);
  ++optimizer.num_steps;
  return true;
}

void run_update(Optimizer& optimizer, const std::function<void()>& update) {
  RankState& own = rank_state("DistributedOptimizer::step");
  is_to_be_watched(own, optimizer) ? watched_update(own, optimizer, update) : update();
}

void values_read(const at::Tensor& tensor, const std::string& reader) {
  const Context* own = try_context();
  if (own == nullptr || own->rank_state == nullptr) return;
  for (const auto& alive : own->rank_state->live_optimizers()) {
    if (alive->origins) alive->origins->values_read(tensor, reader);
  }
}

OptimizerState state_dict(Optimizer& optimizer) {
  const RankState& own = rank_with_state(optimizer, "DistributedOptimizer::state_dict");
  return in_call(own.context, "state_dict of an optimizer", runtime::GroupKind::kPipeline,
                 [&] { return gathered_state(own, optimizer); });
}

OptimizerState local_state_dict(Optimizer& optimizer) {
  OptimizerState state = local_state(rank_with_state(optimizer, "DistributedOptimizer::local_state_dict"), optimizer);
  for (auto& [parameter, fields] : state.entries) {
    for (auto& [field, tensor] : fields) tensor = tensor.clone();
  }
  return state;
}

void load_state_dict(Optimizer& optimizer, const OptimizerState& state) {
  RankState& own = rank_state("DistributedOptimizer::load_state_dict");
  apply_load(own, optimizer, checked_load(own, optimizer, state));
}

OptimizerEntries gathered_entries(const OptimizerEntries& entries) {
  const char* caller = "state of an optimizer";
  refuse_in_body(caller);
  Context& own = context(caller);
  return in_call(own, caller, runtime::GroupKind::kPipeline, [&] { return gathered_entries(entries, *own.pipeline); });
}

void forget_state_of_others(Optimizer& optimizer) {
  if (!optimizer.model->is_partitioned()) return;
  const char* caller = "DistributedOptimizer::local_state_dict";
  refuse_in_body(caller);
  forget_state_of_others(rank_state(caller), optimizer);
}

void zero_grad(const Optimizer& optimizer) {
  refuse_in_body("DistributedOptimizer::zero_grad");
  for (const OptimizerGroup& group : optimizer.view->groups()) {
    for (const at::Tensor& parameter : group.parameters) parameter.mutable_grad().reset();
  }
}

int report_failure(const std::exception_ptr& exception) { return runtime::report_failure(exception); }

void answer_with_stack(const std::function<void(int file)>& add) {
  if (context("answer_with_stack").world->size() > 1) runtime::answer_with_stack(add);
}

}  // namespace smp::engine
