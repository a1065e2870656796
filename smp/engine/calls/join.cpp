// Joins: begun and ended by every rank, the loop of each in between.
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <string>

#include "runtime/exchange/root_cause.h"
#include "smp/engine/context/call.h"
#include "smp/engine/engine.h"
#include "smp/engine/optimizers/optimizer_state.h"
#include "smp/engine/step/step_on_rank.h"

namespace smp::engine {
namespace {

std::string why_not(const Context& own, const JoinOptions& options) {
  if (own.rank_state == nullptr) return "";
  const auto& models = own.rank_state->models.all();
  const bool is_hooked =
      std::any_of(models.begin(), models.end(), [](const auto& model) { return bool(model->reduction.hook); });
  if (is_hooked && !options.divide_by_initial_world_size) {
    return "expected divide_by_initial_world_size with a communication hook, which divides by itself, got false. "
           "Set it, or make the model without the hook.";
  }
  try {
    for (const auto& alive : own.rank_state->live_optimizers()) known_state(*alive, "smp::join");
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// flags: as check() sends them, "10".
std::string options_text(const std::string& flags) {
  const auto word = [](char flag) { return flag == '1' ? "true" : "false"; };
  return c10::str("{.divide_by_initial_world_size = ", word(flags[0]), ", .throw_on_early_termination = ", word(flags[1]),
                  "}");
}

// Of every rank alike, or of one of them.
void check(Context& context, const JoinOptions& options) {
  const std::string own =
      std::to_string(options.divide_by_initial_world_size) + std::to_string(options.throw_on_early_termination);
  const std::vector<std::string> all = in_call(context, "join", runtime::GroupKind::kWorld,
                                               [&] { return context.world->all_gather(own + why_not(context, options)); });
  for (size_t r = 0; r < all.size(); ++r) {
    const std::string first = all[0].substr(0, own.size()), flags = all[r].substr(0, own.size());
    TORCH_CHECK_VALUE(flags == first, "smp::join: expected the same options on all ranks, got ", options_text(first),
                      " on rank 0 and ", options_text(flags), " on rank ", r, ". Give every rank the same.");
    TORCH_CHECK_VALUE(all[r].size() == own.size(), "smp::join: rank ", r, ": ", all[r].substr(own.size()));
  }
}

/// The end of a join, however it comes.
[[nodiscard]] auto ending(Context& own) {
  return c10::make_scope_exit([&own] {
    own.join.reset();
    forget_without_models(own);
  });
}

}  // namespace

void begin_join(const JoinOptions& options) {
  const char* caller = "smp::join";
  refuse_in_body(caller);
  Context& own = context(caller);
  TORCH_CHECK_VALUE(!own.join,
                    "smp::join: expected a call outside of another join, got one within it. "
                    "Let the loop of that one return first.");
  TORCH_CHECK_VALUE(own.config.parallelism == Parallelism::kManual,
                    "smp::join: expected replicas with batches of their own, got parallelism=auto, where they share each "
                    "batch. Give pipeline_parallel_degree.");
  check(own, options);
  if (own.replicas->size() == 1) return;
  own.join = {.options = options};
  if (own.rank_state == nullptr) own.rank_state = std::make_shared<RankState>(own);  // the loop may make the models
}

void end_join() {
  Context* own = try_context();
  if (own == nullptr || !own->join) return;  // one replica; it may have ended its models, and more
  const auto end = ending(*own);
  if (!own->join->has_ended_early) finish_join(*own->rank_state);
}

void abandon_join(const std::exception_ptr& exception) {
  Context* own = try_context();
  if (own == nullptr || !own->join) return;
  const auto end = ending(*own);
  if (!own->join->has_ended_early) own->world->abort(runtime::describe_exception(exception));
}

}  // namespace smp::engine
