// Reducers live with their models: their hooks and their layout stay from step to step.
#include "smp/detail/replica_gradients.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "runtime/reducer.h"

namespace smp::detail {

using namespace partitioner;

runtime::ReducerOptions Reduction::options(int number) const {
  runtime::ReducerOptions options{
      .bucket_bytes = bucket_bytes, .overlap = overlap, .number = number};
  if (!hook) return options;
  options.hook = [user = hook](const at::Tensor& gradients, int64_t index, bool is_last) {
    return user({gradients, index, is_last});
  };
  return options;
}

std::string reductions(const Models& models) {
  std::string reduced;
  for (const auto& model : models.all()) {
    const Reduction& own = model->reduction;
    reduced += own.num_no_sync == 0 && (own.num_passes + 1) % own.passes_per_step == 0 ? '1' : '0';
  }
  return reduced;
}

std::string describe_reductions(const Models& models, const std::string& reduced) {
  std::string text;
  for (size_t m = 0; m < models.all().size(); ++m) {
    const Reduction& own = models.all()[m]->reduction;
    text += (m == 0 ? "" : ", ") + std::string(reduced[m] == '1' ? "averaged" : "kept");
    if (own.hook) text += " by communication hook " + std::to_string(own.num_hooks);
  }
  return text;
}

void count_pass(const Models& models, const std::string& reduced) {
  for (size_t m = 0; m < models.all().size(); ++m) {
    Reduction& own = models.all()[m]->reduction;
    own.keeps_gradients = reduced[m] != '1';
    if (reduced[m] == '1') {
      own.num_passes = 0;
    } else if (own.num_no_sync == 0) {
      ++own.num_passes;
    }
  }
}

void drop_averaged(const Models& models, const std::string& reduced) {
  for (size_t m = 0; m < models.all().size(); ++m) {
    const Model& model = *models.all()[m];
    if (reduced[m] != '1' || model.reduction.keeps_gradients) continue;
    for (const runtime::NamedTensor& named : model.own.tensors()) {
      at::Tensor tensor = named.tensor;
      if (named.kind == ValueKind::kParameter) tensor.mutable_grad() = at::Tensor();
    }
  }
}

ReplicaGradients::ReplicaGradients(Context& context, const Models& models,
                                   const std::string& reduced, int divisor)
    : context_(context), models_(models), divisor_(divisor) {
  if (context.replicas->size() == 1) return;
  std::unordered_set<const void*> taken;
  for (size_t m = 0; m < models.all().size(); ++m) {
    Model& model = *models.all()[m];
    if (reduced[m] == '1' && models.is_placed(model)) add(model, static_cast<int>(m), taken);
    for (const auto& named : model.own.tensors()) taken.insert(named.tensor.unsafeGetTensorImpl());
  }
}

// `taken`: parameters of models before this one, which may share some with it.
void ReplicaGradients::add(Model& model, int number, const std::unordered_set<const void*>& taken) {
  // Tied weights come first, that is last to leave: they are final when the pipeline has summed
  // them.
  std::vector<at::Tensor> tied, own;
  Reducing reducing{.model = &model, .rest = {}};
  const auto& reducer = model.reduction.reducer;
  std::unordered_set<const void*> known;
  if (reducer) {
    for (const at::Tensor& parameter : reducer->parameters())
      known.insert(parameter.unsafeGetTensorImpl());
  }
  for (const runtime::NamedTensor& named : model.own.tensors()) {
    const bool is_taken = taken.contains(named.tensor.unsafeGetTensorImpl());
    if (named.kind != ValueKind::kParameter || !models_.is_here(named.tensor) || is_taken) continue;
    const bool is_new = !reducer && named.tensor.requires_grad() && named.tensor.is_leaf();
    if (is_new) (models_.holders(named.tensor).size() > 1 ? tied : own).push_back(named.tensor);
    if (!is_new && !known.contains(named.tensor.unsafeGetTensorImpl()))
      reducing.rest.push_back(named.tensor);
  }
  if (!reducer) {
    tied.insert(tied.end(), own.begin(), own.end());
    runtime::ReducerOptions options = model.reduction.options(number);
    // A hook may block, and replicas need not be equally far in two models.
    if (options.hook && models_.all().size() > 1) options.overlap = false;
    model.reduction.reducer = std::make_unique<runtime::GradientReducer>(
        std::move(tied), *context_.replicas, std::move(options));
  }
  reducing_.push_back(std::move(reducing));
}

void ReplicaGradients::begin(const std::vector<Action>& column,
                             const std::vector<runtime::MicrobatchRun>& microbatches) {
  std::unordered_map<std::string_view, size_t>
      last;  // by parameter: the backward action that makes it final
  for (const Action& action : column) {
    if (action.kind != ActionKind::kBackward) continue;
    const runtime::RankProgram& program =
        *microbatches[static_cast<size_t>(action.microbatch)].program;
    final_.emplace_back().has_one_backward =
        program.stages.at(action.stage)->values().backwards.size() == 1;
    for (const ValueId id : program.plan->stages[static_cast<size_t>(action.stage)].parameters) {
      last[program.graph->values[static_cast<size_t>(id)].name] = final_.size() - 1;
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
      if (models_.holders(parameter).size() > 1) continue;
      const auto found = last.find(models_.bindings().find(parameter)->name);
      found == last.end() ? untouched.push_back(i)
                          : final_[found->second].parameters[r].push_back(i);
    }
    reducer.add_ready(untouched);
  }
}

void ReplicaGradients::before(const Action&) {
  const Final& now = final_[next_];
  if (!now.has_one_backward) return;
  for (const auto& [r, parameters] : now.parameters)
    reducing_[r].model->reduction.reducer->expect(parameters);
}

void ReplicaGradients::after(const Action&) {
  for (const auto& [r, parameters] : final_[next_].parameters) {
    reducing_[r].model->reduction.reducer->add_ready(parameters);
  }
  ++next_;
}

void ReplicaGradients::finish() {
  for (const Reducing& reducing : reducing_) {
    reducing.model->reduction.reducer->finish();
    runtime::average_gradients(reducing.rest, *context_.replicas,
                               reducing.model->reduction.bucket_bytes, divisor_);
  }
}

}  // namespace smp::detail
