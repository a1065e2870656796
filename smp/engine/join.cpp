// Joins: begun and ended by every rank, the loop of each in between.
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "runtime/exchange/root_cause.h"
#include "smp/engine/checkpoint/optimizer_state.h"
#include "smp/engine/conductor.h"
#include "smp/engine/engine.h"

namespace smp::engine {
namespace {

std::string why_not(const RankState& rank, const JoinOptions& options) {
  const auto& models = rank.models.all();
  const bool is_hooked =
      std::any_of(models.begin(), models.end(), [](const auto& model) { return bool(model->reduction.hook); });
  if (is_hooked && !options.divide_by_initial_world_size) {
    return "expected divide_by_initial_world_size with a communication hook, which divides by itself, got false.";
  }
  try {
    for (const auto& alive : rank.live_optimizers()) check_is_known(*alive, "smp::join");
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Of every rank alike, or of one of them.
void check(const RankState& rank, const JoinOptions& options) {
  runtime::Transport& world = *rank.context.world;
  const std::string own =
      std::to_string(options.divide_by_initial_world_size) + std::to_string(options.throw_on_early_termination);
  const std::vector<std::string> all = world.all_gather(own + why_not(rank, options));
  for (size_t r = 0; r < all.size(); ++r) {
    TORCH_CHECK_VALUE(all[r].substr(0, own.size()) == all[0].substr(0, own.size()),
                      "smp::join: expected the same options on all ranks, got a difference between rank 0 and rank ", r,
                      ".");
    TORCH_CHECK_VALUE(all[r].size() == own.size(), "smp::join: rank ", r, ": ", all[r].substr(own.size()));
  }
}

}  // namespace

void begin_join(const JoinOptions& options) {
  const char* caller = "smp::join";
  refuse_in_body(caller);
  RankState& rank = rank_state(caller);
  Context& own = rank.context;
  TORCH_CHECK_VALUE(!own.is_in_join, "smp::join: expected a call outside of another join, got one within it.");
  TORCH_CHECK_VALUE(own.config.parallelism == Parallelism::kManual,
                    "smp::join: expected replicas with batches of their own, got parallelism=auto, where they share each "
                    "batch. Give pipeline_parallel_degree.");
  check(rank, options);
  if (own.replicas->size() == 1) return;
  own.is_in_join = true;
  rank.join = {options, 0};
}

void end_join() {
  const Context* own = try_context();
  if (own == nullptr || !own->is_in_join) return;  // one replica; it may have ended its models, and more
  RankState& rank = rank_state("smp::join");
  try {
    Conductor(rank).finish_join();
  } catch (...) {
    rank.context.is_in_join = false;
    throw;
  }
  rank.context.is_in_join = false;
}

void abandon_join(const std::exception_ptr& exception) {
  Context* own = try_context();
  if (own == nullptr || !std::exchange(own->is_in_join, false)) return;
  own->world->abort(runtime::describe_exception(exception));
}

}  // namespace smp::engine
