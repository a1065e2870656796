// Each rank runs the update and tells the others what it has found; all keep it, or all put it back.
#include "smp/engine/optimizers/watched_update.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "runtime/exchange/root_cause.h"
#include "smp/engine/context/call.h"
#include "smp/engine/optimizers/parameter_origins.h"

namespace smp::engine {
namespace {

// Momentum and the like are there from the second update on.
constexpr int kNumWatched = 2;

constexpr const char* kBlind =
    "DistributedOptimizer: expected a rank with gradients of two parameters of each group, to see whether the optimizer "
    "updates each by itself, got one or none on every rank. If it mixes the parameters of a group, ranks go on without each "
    "other's.";

std::vector<ParameterOrigins::Followed> followed(const RankState& own, const Optimizer& optimizer) {
  std::vector<ParameterOrigins::Followed> parameters;
  for (const OptimizerGroup& group : optimizer.view->groups()) {
    for (const at::Tensor& parameter : group.parameters) {
      if (!own.models.is_here(parameter)) continue;
      std::vector<at::Tensor> state = optimizer.view->tensors_kept_for(parameter);
      // One element may be a count of updates.
      std::erase_if(state, [&](const at::Tensor& each) { return each.numel() == 1 || each.sizes() != parameter.sizes(); });
      parameters.push_back({parameter, optimizer.model->own.find(parameter)->name, std::move(state)});
    }
  }
  return parameters;
}

std::string refusal_of(const std::string& finding) {
  if (finding.empty()) return "";
  return "DistributedOptimizer::step: expected an optimizer that updates each parameter by its own gradient, got one in "
         "which " +
         finding +
         ". Each rank has a part of the parameters, so that they would be trained by another rule than on one. Nothing has "
         "been updated. smp::clip_grad_norm_(model, INFINITY) gives the norm of all gradients: call it before step() and "
         "give the number to the optimizer. What goes into one parameter alone, compute right before it is updated.";
}

std::string error_of(const std::exception_ptr& thrown, const RankState& own) {
  if (thrown == nullptr) return "";
  return "DistributedOptimizer::step: expected the first updates to go on all ranks, got an error on pipeline rank " +
         std::to_string(own.context.pipeline->rank()) + ": " + runtime::describe_exception(thrown);
}

/// A digit for each group: has it gradients of no parameter here, of one, of more?
std::string gradients_here(const RankState& own, const Optimizer& optimizer) {
  std::string digits;
  for (const OptimizerGroup& group : optimizer.view->groups()) {
    const auto count = std::count_if(group.parameters.begin(), group.parameters.end(), [&](const at::Tensor& parameter) {
      return own.models.is_here(parameter) && parameter.grad().defined();
    });
    digits += static_cast<char>('0' + std::min<int64_t>(count, 2));
  }
  return digits;
}

/// Whether the parameters of a group are on several ranks, one on each.
bool is_blind(const std::vector<std::string>& digits) {
  for (size_t g = 0; g < digits.front().size(); ++g) {
    const auto has = [&](char digit) { return [&, digit](const std::string& rank) { return rank.at(g) == digit; }; };
    if (std::none_of(digits.begin(), digits.end(), has('2')) && std::count_if(digits.begin(), digits.end(), has('1')) > 1) {
      return true;
    }
  }
  return false;
}

/// The first of all ranks.
struct Outcome {
  std::string refusal, error;
  bool is_blind = false;
};

Outcome outcome_on_all(const RankState& own, const std::string& finding, const std::exception_ptr& thrown,
                       const std::string& gradients) {
  const auto first = [&](const std::string& text) {
    for (std::string& each : own.context.pipeline->all_gather(text)) {
      if (!each.empty()) return std::move(each);
    }
    return std::string();
  };
  return in_call(own.context, "a first update", runtime::GroupKind::kPipeline, [&] {
    return Outcome{first(refusal_of(finding)), first(error_of(thrown, own)),
                   is_blind(own.context.pipeline->all_gather(gradients))};
  });
}

}  // namespace

bool is_to_be_watched(const RankState& own, const Optimizer& optimizer) {
  return own.context.pipeline->size() > 1 && optimizer.model->is_partitioned() && !optimizer.view->is_elementwise() &&
         optimizer.num_watched < kNumWatched;
}

void watched_update(RankState& own, Optimizer& optimizer, const std::function<void()>& update) {
  if (optimizer.origins == nullptr) optimizer.origins = std::make_shared<ParameterOrigins>();
  ParameterOrigins& origins = *optimizer.origins;
  const std::function<void()> put_back_others = optimizer.view->snapshot();
  origins.begin(followed(own, optimizer));
  const std::string gradients = gradients_here(own, optimizer);
  std::exception_ptr thrown;
  try {
    const runtime::InterceptScope scope(origins);
    update();
  } catch (const CommError&) {
    throw;
  } catch (...) {
    thrown = std::current_exception();
  }
  origins.end();
  const Outcome outcome = outcome_on_all(own, origins.finding(), thrown, gradients);
  if (outcome.refusal.empty() && outcome.error.empty()) {
    if (outcome.is_blind && optimizer.num_watched == 0 && own.context.world->rank() == 0) own.context.logger.warning(kBlind);
    origins.keep();
    if (++optimizer.num_watched == kNumWatched) optimizer.origins.reset();
    return;
  }
  origins.put_back();
  put_back_others();
  --optimizer.num_steps;
  TORCH_CHECK_VALUE(outcome.refusal.empty(), outcome.refusal);
  if (thrown) std::rethrow_exception(thrown);
  TORCH_CHECK(false, outcome.error);
}

}  // namespace smp::engine
