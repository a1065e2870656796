// Messages in, rounds out.
#include "smp/engine/conductor.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "partitioner/graph/graph_io.h"
#include "partitioner/plan/check_plan.h"
#include "partitioner/plan/plan_io.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/tags.h"
#include "smp/engine/checkpoint/optimizer_state.h"
#include "smp/engine/optimizers/optimizer_settings.h"
#include "smp/engine/planning/measure_costs.h"
#include "smp/engine/replicas/replica_gradients.h"
#include "smp/engine/replicas/replica_step.h"
#include "smp/engine/step/leader.h"

namespace smp::engine {

using runtime::Round;
using runtime::StepMessage;

namespace {

/// A step, from its first message to its last: within a join, all replicas do the same in here.
class StepScope {
 public:
  StepScope(Context& context, Models& models) : context_(context), models_(models) { context_.is_in_step = true; }
  ~StepScope() {
    context_.is_in_step = false;
    models_.forget_alike();
  }
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;

 private:
  Context& context_;
  Models& models_;
};

}  // namespace

step_internal::Results Conductor::run_step(int step_number, const step_internal::Call& call) {
  TORCH_CHECK(context().body_in_progress == nullptr,
              "step: expected a call outside of step bodies, got one from within a body. Call the step functions one after "
              "the other, or share a plain function between their bodies.");
  forget_ended_steps();
  const StepScope scope(context(), rank_.models);
  measure_costs(rank_, step_number, call);
  begin_recorded_step();
  if (!context().is_laid_out) lay_out(rank_, step_number, call);
  auto returned = rank_.leads() ? Leader(rank_, step_number, call).run() : follow(step_number);
  end_recorded_step();
  return returned;
}

void Conductor::begin_recorded_step() {
  if (context().timeline) context().timeline->recorder().begin_step();
}

void Conductor::end_recorded_step() {
  if (context().timeline && context().timeline->end_step()) context().timeline.reset();
}

void Conductor::forget_ended_steps() {
  for (const int number : std::exchange(context().steps->ended, {})) {
    rank_.captures.erase(number);
    std::erase_if(rank_.auto_microbatches, [number](const auto& chosen) { return chosen.first.first == number; });
  }
}

step_internal::Results Conductor::follow(int step_number) {
  StepRun run(rank_);
  for (;;) {
    const StepMessage message = receive_message();
    if (!message.error.empty()) {
      run.drop_from(0);
      throw_refusal(message);
    }
    if (auto returned = perform(run, message, step_number)) return std::move(*returned);
  }
}

std::optional<step_internal::Results> Conductor::perform(StepRun& run, const StepMessage& message, int step_number) {
  MicrobatchInputs none;
  try {
    if (message.round != Round::kShadow) accept(message, step_number);
    check_settings(message);
    return run.perform(message, none);
  } catch (...) {
    // The others are in the middle of this step and would wait for ever, should the caller go on.
    context().world->abort(runtime::describe_exception(std::current_exception()));
    throw;
  }
}

void Conductor::finish_join() {
  const int source = rank_.leads() ? lead_join() : follow_join();
  try {
    check_optimizers(rank_, *context().pipeline, "smp::join");
  } catch (const c10::Error& error) {  // the pipelines of other replicas may have no such difference
    context().world->abort(error.what_without_backtrace());
    throw;
  }
  take_over_from(source);
  forget_optimizer_steps(rank_);
  for (const auto& model : rank_.models.all()) model->reduction.num_passes = 0;  // replicas may be at different ones
}

int Conductor::lead_join() {
  const step_internal::Call none;
  for (;;) {
    const StepScope scope(context(), rank_.models);
    begin_recorded_step();
    Leader leader(rank_, 0, none);
    const std::optional<int> source = leader.shadow();
    end_recorded_step();
    if (!source) continue;
    leader.end_join(*source);
    return *source;
  }
}

int Conductor::follow_join() {
  for (;;) {
    const StepScope scope(context(), rank_.models);
    begin_recorded_step();
    StepRun run(rank_);
    for (bool is_over = false; !is_over;) {
      const StepMessage message = receive_message();
      if (message.round == Round::kJoined) return message.first_active_replica;
      if (!message.error.empty() && rank_.join.options.throw_on_early_termination) throw_refusal(message);
      is_over = !message.error.empty() || perform(run, message, message.step_function).has_value();
    }
    end_recorded_step();
  }
}

void Conductor::take_over_from(int replica) {
  for (const auto& model : rank_.models.all()) {
    broadcast_over_replicas(rank_, *model, replica, [](const runtime::NamedTensor&) { return true; });
  }
  for (const auto& alive : rank_.live_optimizers()) broadcast_local_state(rank_, *alive, replica);
}

void Conductor::check_is_for_us(const StepMessage& message) const {
  const auto is_unknown = [](char c) { return c != kAverages && c != kKeeps && c != kMakesNone; };
  const auto& reduced = message.reduced;
  const bool has_all = reduced.size() == rank_.models.all().size() || (reduced.empty() && !message.trains);
  const auto num_values = static_cast<int64_t>(message.values.size());
  TORCH_CHECK(num_values == 0 || num_values == message.num_microbatches, "step: expected a value for each of ",
              message.num_microbatches, " microbatches, got ", num_values, ". Ranks run different versions of smp.");
  TORCH_CHECK(has_all && std::none_of(reduced.begin(), reduced.end(), is_unknown) &&
                  message.first_active_replica < context().replicas->size(),
              "step: expected a message for ", rank_.models.all().size(), " models and ", context().replicas->size(),
              " replicas, got one for '", reduced, "' and replica ", message.first_active_replica,
              ". Ranks run different programs or versions of smp.");
}

StepMessage Conductor::receive_message() {
  const std::string bytes = context().pipeline->receive_bytes(0, runtime::kStepTag);
  StepMessage message;
  try {
    message = runtime::decode_step_message(bytes);
    check_is_for_us(message);
  } catch (...) {  // the leader waits for this rank within the step
    context().world->abort(runtime::describe_exception(std::current_exception()));
    throw;
  }
  for (uint64_t hash : message.forgotten) rank_.programs.erase(hash);
  return message;
}

void Conductor::check_settings(const StepMessage& message) const {
  if (message.settings.empty()) return;
  const std::string own = describe_settings(rank_.models);
  TORCH_CHECK_VALUE(
      own == message.settings, "step: expected the same communication hooks and parameters with requires_grad ",
      "on all ranks of a pipeline, got ", message.settings, " on pipeline rank 0 and ", own, " on pipeline rank ",
      context().pipeline->rank(), ". Register hooks, freeze and unfreeze on every rank alike.");
  const std::string optimizers = describe_optimizers(rank_);
  TORCH_CHECK_VALUE(optimizers == message.optimizers,
                    differing_optimizers("step", message.optimizers, "pipeline rank 0", optimizers,
                                         "pipeline rank " + std::to_string(context().pipeline->rank())));
}

void Conductor::accept(const StepMessage& message, int step_number) {
  TORCH_CHECK(message.step_function == step_number,
              "step: expected all ranks of a pipeline to call the same step function, got number ", message.step_function,
              " on pipeline rank 0 and number ", step_number, " on pipeline rank ", context().pipeline->rank(),
              ". Make and call step functions in the same order.");
  for (const runtime::NewProgram& fresh : message.new_programs) {
    partitioner::Graph graph = partitioner::deserialise_graph(fresh.graph);
    partitioner::Plan plan = partitioner::deserialise_plan(fresh.plan, graph);
    TORCH_CHECK_VALUE(plan.num_ranks == context().pipeline->size(), "step: expected a plan for ", context().pipeline->size(),
                      " pipeline ranks, got one for ", plan.num_ranks, ".");
    partitioner::check(graph, plan);
    const auto program = rank_.programs.add(std::move(graph), std::move(plan), fresh.hash);
    for (const auto& constant : fresh.constants) program->constants[constant.value] = constant.tensor;
  }
}

}  // namespace smp::engine
