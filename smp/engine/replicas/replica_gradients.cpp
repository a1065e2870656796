// Reducers live with their models: their hooks and their layout stay from step to step.
#include "smp/engine/replicas/replica_gradients.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "partitioner/schedule/dependencies.h"
#include "runtime/transport/abandoned.h"
#include "smp/engine/models/program.h"

namespace smp::engine {

using namespace partitioner;

runtime::ReducerOptions Reduction::options(int number) const {
  runtime::ReducerOptions options{
      .bucket_bytes = bucket_bytes, .shares_memory = !by_messages, .overlap = overlap, .number = number};
  if (!hook) return options;
  options.hook = [user = hook](const at::Tensor& gradients, int64_t index, bool is_last) {
    return user({gradients, index, is_last});
  };
  return options;
}

std::vector<Averaging> reductions(const Models& models) {
  std::vector<Averaging> reduced;
  for (const auto& model : models.all()) {
    const Reduction& own = model->reduction;
    const bool averages = own.num_no_sync == 0 && (own.num_passes + 1) % own.passes_per_step == 0;
    reduced.push_back(averages ? Averaging::kAverages : Averaging::kKeeps);
  }
  return reduced;
}

std::vector<Averaging> reductions(const Models& models, const std::vector<std::shared_ptr<Program>>& programs) {
  std::vector<Averaging> reduced = reductions(models);
  for (size_t m = 0; m < reduced.size(); ++m) {
    const runtime::Bindings& own = models.all()[m]->own;
    const auto is_own = [&](const at::Tensor& parameter) { return own.find(parameter) != nullptr; };
    const bool is_trained = std::any_of(programs.begin(), programs.end(), [&](const std::shared_ptr<Program>& program) {
      return std::any_of(program->trained.begin(), program->trained.end(), is_own);
    });
    if (!is_trained) reduced[m] = Averaging::kMakesNone;
  }
  return reduced;
}

std::vector<ModelSettings> settings_of(const Models& models) {
  std::vector<ModelSettings> all;
  for (const auto& model : models.all()) {
    ModelSettings& own = all.emplace_back(ModelSettings{.prefix = model->prefix,
                                                        .pattern = 2166136261U,  // FNV-1a
                                                        .has_hook = model->reduction.hook != nullptr,
                                                        .num_hooks = model->reduction.num_hooks});
    for (const runtime::NamedTensor& named : model->own.tensors()) {
      if (named.kind != ValueKind::kParameter) continue;
      const bool is_trainable = named.tensor.requires_grad();
      own.num_trainable += is_trainable, ++own.num_parameters;
      own.pattern = (own.pattern ^ (is_trainable ? 1U : 2U)) * 16777619U;
    }
  }
  return all;
}

void count_pass(const Models& models, const std::vector<Averaging>& reduced) {
  for (size_t m = 0; m < models.all().size(); ++m) {
    Reduction& own = models.all()[m]->reduction;
    if (reduced[m] == Averaging::kMakesNone) continue;
    own.keeps_gradients = reduced[m] == Averaging::kKeeps;
    if (reduced[m] == Averaging::kAverages) {
      own.num_passes = 0;
    } else if (own.num_no_sync == 0) {
      ++own.num_passes;
    }
  }
}

void drop_averaged(const Models& models, const std::vector<Averaging>& reduced) {
  for (size_t m = 0; m < models.all().size(); ++m) {
    const Model& model = *models.all()[m];
    if (reduced[m] != Averaging::kAverages || model.reduction.keeps_gradients) continue;
    for (const runtime::NamedTensor& named : model.own.tensors()) {
      at::Tensor tensor = named.tensor;
      if (named.kind == ValueKind::kParameter) tensor.mutable_grad() = at::Tensor();
    }
  }
}

ReplicaGradients::ReplicaGradients(Context& context, const Models& models, const std::vector<Averaging>& reduced,
                                   int divisor)
    : context_(context), models_(models), divisor_(divisor) {
  if (context.replicas->size() == 1) return;
  std::unordered_set<const void*> taken;
  for (size_t m = 0; m < models.all().size(); ++m) {
    Model& model = *models.all()[m];
    if (reduced[m] == Averaging::kAverages && model.is_partitioned()) add(model, taken);
    for (const auto& named : model.own.tensors()) taken.insert(named.tensor.unsafeGetTensorImpl());
  }
}

// `taken`: parameters of models before this one, which may share some with it. All replicas have the
// same flags (settings_of), so all make a reducer anew or none does.
void ReplicaGradients::add(Model& model, const std::unordered_set<const void*>& taken) {
  // Tied weights come first, that is last to leave: they are final when the pipeline has summed them.
  std::vector<at::Tensor> parameters, own;
  Reducing reducing{.model = &model, .frozen = {}};
  for (const runtime::NamedTensor& named : model.own.tensors()) {
    const bool is_taken = taken.contains(named.tensor.unsafeGetTensorImpl());
    if (named.kind != ValueKind::kParameter || !models_.is_here(named.tensor) || is_taken) continue;
    const bool is_trained = named.tensor.requires_grad() && named.tensor.is_leaf();
    const bool is_tied = models_.home(named.tensor).is_tied();
    (!is_trained ? reducing.frozen : is_tied ? parameters : own).push_back(named.tensor);
  }
  parameters.insert(parameters.end(), own.begin(), own.end());
  make_reducer(model, std::move(parameters));
  reducing_.push_back(std::move(reducing));
}

void ReplicaGradients::make_reducer(Model& model, std::vector<at::Tensor> parameters) {
  auto& reducer = model.reduction.reducer;
  runtime::ReducerOptions options = model.reduction.options(model.number);
  options.looks_for_nonfinite = context_.config.nonfinite != Nonfinite::kIgnore;
  // A hook may block, and replicas need not be equally far in two models.
  if (options.hook && models_.all().size() > 1) options.overlap = false;
  if (reducer && reducer->options().overlap == options.overlap && reducer->is_for(parameters)) return;
  reducer.reset();  // its hooks go before those of the new one come
  const bool wants_memory = context_.replicas_share_memory && options.shares_memory && !options.hook && !parameters.empty();
  reducer = std::make_unique<runtime::GradientReducer>(std::move(parameters), *context_.replicas, std::move(options));
  if (wants_memory && reducer->shared_bytes() == 0) {
    model.reduction.by_messages = true;  // plans to come count with it
    context_.logger.warning(
        "gradients: expected room in shared memory for a bucket of each rank (bucket_cap_mb, or the largest parameter), got "
        "too little; they are sent as messages instead, and take a bucket more than predicted. Make room in /dev/shm "
        "(docker run --shm-size).");
  }
}

void ReplicaGradients::begin(const std::vector<Action>& column, const std::vector<runtime::MicrobatchRun>& microbatches) {
  std::unordered_map<std::string_view, Final*> last;  // by parameter: what makes it final
  const Action* before = nullptr;                     // the computation before this one
  for (const Action& action : column) {
    if (!action.is_compute()) continue;
    const Action* const previous = std::exchange(before, &action);
    if (!holds(action.row().makes, Item::kWeightGradients)) continue;
    const runtime::RankProgram& program = *microbatches[static_cast<size_t>(action.microbatch)].program;
    Final& own = final_[{action.stage, action.microbatch}];
    const bool is_behind_its_own = previous != nullptr && follows_at_once(action, *previous);
    own.is_next = is_behind_its_own && program.stages.at(action.stage)->values().backwards.size() == 1;
    for (const ValueId id : program.plan->stages[static_cast<size_t>(action.stage)].parameters) {
      last[program.graph->values[static_cast<size_t>(id)].name] = &own;
    }
  }
  for (size_t r = 0; r < reducing_.size(); ++r) {
    Model& model = *reducing_[r].model;
    runtime::GradientReducer& reducer = *model.reduction.reducer;
    reducer.begin(divisor_);
    if (!reducer.options().overlap) continue;
    std::vector<size_t> untouched;
    for (size_t i = 0; i < reducer.parameters().size(); ++i) {
      const at::Tensor& parameter = reducer.parameters()[i];
      if (models_.home(parameter).is_tied()) continue;
      const auto found = last.find(models_.bindings().find(parameter)->name);
      found == last.end() ? untouched.push_back(i) : found->second->parameters[r].push_back(i);
    }
    reducer.add_ready(untouched);
  }
}

void ReplicaGradients::before_backward(const Action& action) {
  const Final& now = final_.at({action.stage, action.microbatch});
  if (!now.is_next) return;
  for (const auto& [r, parameters] : now.parameters) reducing_[r].model->reduction.reducer->expect(parameters);
}

void ReplicaGradients::after_weight_gradients(const Action& action) {
  for (const auto& [r, parameters] : final_.at({action.stage, action.microbatch}).parameters) {
    reducing_[r].model->reduction.reducer->add_ready(parameters);
  }
}

void ReplicaGradients::finish() {
  for (const Reducing& reducing : reducing_) {
    reducing.model->reduction.reducer->finish();
    average_frozen(reducing);
  }
}

// Those that some replica has: as a rule none, so that no reducer is kept for them.
void ReplicaGradients::average_frozen(const Reducing& reducing) const {
  if (reducing.frozen.empty()) return;
  const auto num_replicas = std::make_shared<std::vector<int64_t>>();  // that have a gradient, by parameter
  for (const at::Tensor& parameter : reducing.frozen) num_replicas->push_back(parameter.grad().defined());
  runtime::keeping(num_replicas, [&] {
    const auto size = static_cast<int64_t>(num_replicas->size());
    context_.replicas->all_reduce_sum(num_replicas->data(), size, c10::ScalarType::Long);
  });
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i < reducing.frozen.size(); ++i) {
    if ((*num_replicas)[i] > 0) kept.push_back(reducing.frozen[i]);
  }
  if (kept.empty()) return;
  runtime::GradientReducer reducer(std::move(kept), *context_.replicas,
                                   {.bucket_bytes = reducing.model->reduction.bucket_bytes,
                                    .shares_memory = false,
                                    .overlap = false,
                                    .number = reducing.model->number});
  reducer.begin(divisor_);
  reducer.finish();
}

}  // namespace smp::engine
