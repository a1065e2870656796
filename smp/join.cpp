// The collective around the loop.
#include "smp/join.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "runtime/exchange/root_cause.h"
#include "smp/engine/conductor.h"
#include "smp/engine/state/optimizer_state.h"

namespace smp {
namespace {

/// Replicas may be at different steps while it lives.
class JoinScope {
 public:
  explicit JoinScope(engine::Context& context) : context_(context) { context_.is_in_join = true; }
  ~JoinScope() { context_.is_in_join = false; }
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

 private:
  engine::Context& context_;
};

std::string why_not(const engine::Conductor& conductor, const JoinOptions& options) {
  const auto& models = conductor.models().all();
  const bool is_hooked =
      std::any_of(models.begin(), models.end(), [](const auto& model) { return bool(model->reduction.hook); });
  if (is_hooked && !options.divide_by_initial_world_size) {
    return "expected divide_by_initial_world_size with a communication hook, which divides by itself, got false.";
  }
  try {
    conductor.check_optimizer_states();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Of every rank alike, or of one of them.
void check(const engine::Conductor& conductor, const JoinOptions& options) {
  runtime::Transport& world = *conductor.context().world;
  const std::string own = std::to_string(options.divide_by_initial_world_size) + std::to_string(options.throw_on_early_termination);
  const std::vector<std::string> all = world.all_gather(own + why_not(conductor, options));
  for (size_t r = 0; r < all.size(); ++r) {
    TORCH_CHECK_VALUE(all[r].substr(0, own.size()) == all[0].substr(0, own.size()),
                      "smp::join: expected the same options on all ranks, got a difference between rank 0 and rank ", r, ".");
    TORCH_CHECK_VALUE(all[r].size() == own.size(), "smp::join: rank ", r, ": ", all[r].substr(own.size()));
  }
}

}  // namespace

void join(const std::function<void()>& loop, const JoinOptions& options) {
  const char* caller = "smp::join";
  engine::refuse_in_body(caller);
  engine::Conductor& conductor = engine::conductor(caller);
  engine::Context& context = conductor.context();
  TORCH_CHECK_VALUE(!context.is_in_join, "smp::join: expected a call outside of another join, got one within it.");
  TORCH_CHECK_VALUE(context.config.parallelism == Parallelism::kManual, "smp::join: expected replicas with batches of their "
                    "own, got parallelism=auto, where they share each batch. Give pipeline_parallel_degree.");
  check(conductor, options);
  if (context.replicas->size() == 1) return loop();
  const JoinScope scope(context);
  conductor.begin_join(options);
  try {
    loop();
  } catch (...) {
    context.world->abort(runtime::describe_exception(std::current_exception()));
    throw;
  }
  conductor.finish_join();
}

}  // namespace smp
