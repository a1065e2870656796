// Each rank runs the update and tells the others what it has found; all keep it, or all put it back.
#include "smp/engine/optimizers/watched_update.h"

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <vector>

#include "runtime/exchange/root_cause.h"
#include "smp/engine/context/call.h"
#include "smp/engine/optimizers/parameter_origins.h"

namespace smp::engine {
namespace {

// Momentum and the like are there from the second update on.
constexpr int kNumWatched = 2;

std::vector<ParameterOrigins::Followed> followed(const RankState& own, const Optimizer& optimizer) {
  std::vector<ParameterOrigins::Followed> parameters;
  for (const OptimizerGroup& group : optimizer.view->groups()) {
    for (const at::Tensor& parameter : group.parameters) {
      if (!own.models.is_here(parameter)) continue;
      parameters.push_back({.parameter = parameter,
                            .name = optimizer.model->own.find(parameter)->name,
                            .state = optimizer.view->tensors_kept_for(parameter)});
    }
  }
  return parameters;
}

std::string refusal_of(const std::string& finding) {
  return "DistributedOptimizer::step: expected an optimizer that updates each parameter by its own gradient, got one in which " +
         finding +
         ". Each rank has a part of the parameters, so that they would be trained by another rule than on one. Nothing has "
         "been updated. smp::clip_grad_norm_(model, INFINITY) gives the norm of all gradients: call it before step() and give "
         "the number to the optimizer. What goes into one parameter alone, compute right before it is updated.";
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
  std::exception_ptr thrown;
  std::string complaint;
  try {
    const runtime::InterceptScope scope(origins);
    update();
  } catch (const CommError&) {
    throw;
  } catch (...) {
    thrown = std::current_exception();
    complaint = "DistributedOptimizer::step: expected the first updates to go on all ranks, got an error on pipeline rank " +
                std::to_string(own.context.pipeline->rank()) + ": " + runtime::describe_exception(thrown);
  }
  origins.end();
  if (!origins.finding().empty()) complaint = refusal_of(origins.finding());
  std::vector<std::string> complaints = in_call(own.context, "a first update", runtime::GroupKind::kPipeline,
                                                [&] { return own.context.pipeline->all_gather(complaint); });
  std::erase(complaints, "");
  if (complaints.empty()) {
    if (++optimizer.num_watched == kNumWatched) optimizer.origins.reset();
    return;
  }
  origins.put_back();
  put_back_others();
  --optimizer.num_steps;
  if (thrown && origins.finding().empty()) std::rethrow_exception(thrown);
  TORCH_CHECK_VALUE(false, complaints.front());
}

}  // namespace smp::engine
