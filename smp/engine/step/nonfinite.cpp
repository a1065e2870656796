// Found where it is, told to all, put into words where it is thrown.
#include "smp/engine/step/nonfinite.h"

#include <ATen/ops/isnan.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <unordered_set>

#include "runtime/exchange/wire.h"
#include "runtime/libtorch/finite.h"
#include "runtime/transport/abandoned.h"
#include "smp/engine/optimizers/optimizer.h"

namespace smp::engine {
namespace {

using partitioner::ValueKind;

bool has_nan(const at::Tensor& tensor) {
  const at::Tensor values = tensor.is_sparse() ? tensor._values() : tensor;
  return values.isnan().any().item<bool>();
}

std::string described(const NonfiniteNumber& number) {
  if (number.place == NonfinitePlace::kGradientNorm) return "a global norm of the gradients that is not finite";
  const std::string what = number.place == NonfinitePlace::kGradient ? "nan or inf" : number.is_nan ? "nan" : "inf";
  const std::string place = number.place == NonfinitePlace::kLoss ? "loss of microbatch " + std::to_string(number.microbatch)
                                                                  : "gradient of '" + number.parameter + "'";
  return what + " in the " + place + " on rank " + std::to_string(number.rank) + " in training step " +
         std::to_string(number.step);
}

bool has_gradient(const runtime::NamedTensor& named) {
  const at::Tensor& gradient = named.tensor.grad();
  return gradient.defined() && (gradient.is_sparse() || gradient.any().item<bool>());
}

using Parameters = std::vector<runtime::NamedTensor>;

// Those of each optimizer of the model; all of the model where it has none. Nobody uses the gradients of others, nor clears
// them.
std::vector<Parameters> updated_parameters(const RankState& rank, const Model& model) {
  const auto& tensors = model.own.tensors();
  std::vector<Parameters> all;
  for (const auto& alive : rank.live_optimizers()) {
    if (alive->model.get() != &model) continue;
    std::unordered_set<const c10::TensorImpl*> updated;
    for (const OptimizerGroup& group : alive->view->groups()) {
      for (const at::Tensor& parameter : group.parameters) updated.insert(parameter.unsafeGetTensorImpl());
    }
    std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(all.emplace_back()),
                 [&](const auto& named) { return updated.contains(named.tensor.unsafeGetTensorImpl()); });
  }
  if (!all.empty()) return all;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(all.emplace_back()),
               [](const auto& named) { return named.kind == ValueKind::kParameter; });
  return all;
}

bool is_cleared(const RankState& rank, const Model& model) {
  const auto all = updated_parameters(rank, model);
  return std::any_of(all.begin(), all.end(), [&](const Parameters& parameters) {
    const auto is_trained_here = [&](const auto& named) {
      return named.tensor.requires_grad() && rank.models.is_here(named.tensor);
    };
    return std::any_of(parameters.begin(), parameters.end(), is_trained_here) &&
           std::none_of(parameters.begin(), parameters.end(), has_gradient);
  });
}

NonfiniteNumber find(const RankState& rank, Model& model) {
  std::vector<size_t> before_mean;
  if (model.reduction.reducer) before_mean = model.reduction.reducer->take_nonfinite();
  if (model.nonfinite.loss.exists()) return model.nonfinite.loss;
  const auto& all = model.own.tensors();
  std::vector<at::Tensor> gradients;
  for (const runtime::NamedTensor& named : all) {
    if (named.kind == ValueKind::kParameter) gradients.push_back(named.tensor.grad());
  }
  if (before_mean.empty() && runtime::are_finite(gradients)) return {};
  Parameters parameters;
  for (const Parameters& some : updated_parameters(rank, model))
    parameters.insert(parameters.end(), some.begin(), some.end());
  const auto found = [&](NonfinitePlace place, bool is_nan, const std::string& name) {
    return NonfiniteNumber{.place = place, .is_nan = is_nan, .rank = rank.context.world->rank(), .parameter = name};
  };
  for (const size_t i : before_mean) {
    const at::Tensor& bad = model.reduction.reducer->parameters()[i];
    for (const runtime::NamedTensor& named : parameters) {
      if (named.tensor.is_same(bad)) return found(NonfinitePlace::kGradient, false, named.name);
    }
  }
  for (const runtime::NamedTensor& named : parameters) {
    const at::Tensor& mean = named.tensor.grad();
    if (!runtime::is_finite(mean)) return found(NonfinitePlace::kMeanGradient, has_nan(mean), named.name);
  }
  return {};
}

NonfiniteNumber nearest_to_the_cause(const NonfiniteNumber& own, runtime::Transport& world) {
  NonfiniteNumber nearest;
  for (const NonfiniteNumber& other : runtime::gather(own, world, "number that is not finite")) {
    if (other.place < nearest.place) nearest = other;
  }
  return nearest;
}

}  // namespace

void note_cleared(const RankState& rank, bool has_step) {
  for (const auto& model : rank.models.all()) {
    model->nonfinite.loss = {};
    model->nonfinite.is_cleared = has_step && model->nonfinite.is_loss && is_cleared(rank, *model);
  }
}

void note_losses(RankState& rank, const std::vector<std::shared_ptr<Program>>& programs, const runtime::RankResults& results,
                 const std::vector<Averaging>& reduced) {
  if (rank.context.config.nonfinite == Nonfinite::kIgnore) return;
  std::vector<at::Tensor> losses;
  for (size_t m = 0; m < programs.size(); ++m) {
    for (const partitioner::ValueId root : programs[m]->graph.backward_roots) {
      if (const auto loss = results[m].find(root); loss != results[m].end()) losses.push_back(loss->second);
    }
  }
  if (runtime::are_finite(losses)) return;
  for (size_t m = 0; m < programs.size(); ++m) {
    for (const partitioner::ValueId root : programs[m]->graph.backward_roots) {
      const auto loss = results[m].find(root);
      if (loss == results[m].end() || runtime::is_finite(loss->second)) continue;
      const NonfiniteNumber found{.place = NonfinitePlace::kLoss,
                                  .is_nan = has_nan(loss->second),
                                  .rank = rank.context.world->rank(),
                                  .microbatch = static_cast<int32_t>(m)};
      for (size_t i = 0; i < reduced.size(); ++i) {
        NonfiniteNumber& first = rank.models.all()[i]->nonfinite.loss;
        if (reduced[i] != Averaging::kMakesNone && !first.exists()) first = found;
      }
    }
  }
}

void agree_on_nonfinite(RankState& rank, const std::vector<Averaging>& reduced, uint64_t number) {
  const Context& context = rank.context;
  if (context.config.nonfinite == Nonfinite::kIgnore) return;
  std::vector<NonfiniteNumber> found;
  // That have found something, and whose gradients were cleared, by model.
  const auto num_ranks = std::make_shared<std::vector<int64_t>>();
  for (size_t i = 0; i < reduced.size(); ++i) {
    Model& model = *rank.models.all()[i];
    found.push_back(reduced[i] == Averaging::kMakesNone ? NonfiniteNumber() : find(rank, model));
    num_ranks->push_back(found.back().exists());
    num_ranks->push_back(model.nonfinite.is_cleared);
  }
  for (const auto* group : {&context.pipeline, &context.replicas}) {
    const auto count = static_cast<int64_t>(num_ranks->size());
    runtime::keeping(num_ranks, [&] { (*group)->all_reduce_sum(num_ranks->data(), count, c10::ScalarType::Long); });
  }
  for (size_t i = 0; i < reduced.size(); ++i) {
    if (reduced[i] == Averaging::kMakesNone) continue;
    NonfiniteState& state = rank.models.all()[i]->nonfinite;
    if (!state.is_loss || (*num_ranks)[2 * i + 1] > 0) state.known = {}, state.is_loss = false;
    if ((*num_ranks)[2 * i] == 0) continue;
    NonfiniteNumber now = nearest_to_the_cause(found[i], *context.world);
    if (state.known.exists()) continue;
    now.step = number;
    state.is_loss = now.place == NonfinitePlace::kLoss;
    state.known = std::move(now);
  }
}

bool may_update(RankState& rank, const Model& model, bool has_finite_gradients) {
  const Context& context = rank.context;
  if (has_finite_gradients && model.nonfinite.is_loss) return true;
  if (!model.nonfinite.known.exists() || context.config.nonfinite == Nonfinite::kIgnore) return true;
  const std::string text =
      "DistributedOptimizer::step: expected finite losses and gradients, got " + described(model.nonfinite.known);
  with_exit_code(ExitCode::kNumerics, [&] {
    TORCH_CHECK(context.config.nonfinite == Nonfinite::kSkip, text,
                ". No rank has updated anything. Find the cause, or set Config::nonfinite: skip leaves such updates out, as "
                "loss scaling needs it, and ignore makes them.");
  });
  ++rank.num_skipped_updates;
  if (context.world->rank() == 0) {
    context.logger.warning(text + ": the update is skipped, as nonfinite=skip says; " +
                           std::to_string(rank.num_skipped_updates) + " so far");
  }
  return false;
}

}  // namespace smp::engine
