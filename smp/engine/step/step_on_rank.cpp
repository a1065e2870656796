// Messages in, rounds out.
#include "smp/engine/step/step_on_rank.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <optional>
#include <utility>

#include "partitioner/graph/graph_io.h"
#include "partitioner/plan/check_plan.h"
#include "partitioner/plan/plan_io.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/tags.h"
#include "smp/engine/context/call.h"
#include "smp/engine/optimizers/optimizer_settings.h"
#include "smp/engine/optimizers/optimizer_state.h"
#include "smp/engine/planning/measure_costs.h"
#include "smp/engine/replicas/replica_gradients.h"
#include "smp/engine/replicas/replica_step.h"
#include "smp/engine/step/leader.h"
#include "smp/engine/step/replica_meeting.h"

namespace smp::engine {

using runtime::Round;
using runtime::StepMessage;

namespace {

/// What fn() returns, which is a step, from its first message to its last: within a join, all replicas do the same in here.
/// A leader waits for nobody at its beginning: who is not in it hears of it, and ends the job.
template <class Fn>
auto in_step(RankState& rank, const Fn& fn) {
  rank.context.is_in_step = true;
  rank.pace.begin_step(rank.context.in_calls_ns);
  const auto scope = c10::make_scope_exit([&rank] {
    rank.pace.end_step(rank.context.in_calls_ns);
    rank.context.is_in_step = false;
    rank.models.forget_alike();
  });
  const std::vector<int> ranks = ranks_of_step(rank.context);
  const InCall in_call(rank.context, "step");
  tell_call(rank.context, "step", ranks);
  if (!rank.leads()) hear_call(rank.context, "step", {ranks.front()});
  return naming_call("step", ranks, fn);
}

void check_is_for_us(const RankState& rank, const StepMessage& message) {
  const size_t num_models = message.reduced.size();
  const bool has_all = num_models == rank.models.all().size() || (num_models == 0 && !message.trains);
  const auto num_values = static_cast<int64_t>(message.values.size());
  TORCH_CHECK(num_values == 0 || num_values == message.num_microbatches, "step: expected a value for each of ",
              message.num_microbatches, " microbatches, got ", num_values, ". Ranks run different versions of smp.");
  TORCH_CHECK(has_all && message.first_active_replica < rank.context.replicas->size() &&
                  (message.round != Round::kJoined || rank.context.join),
              "step: expected a message for ", rank.models.all().size(), " models and ", rank.context.replicas->size(),
              " replicas, got one for ", num_models, " and replica ", message.first_active_replica,
              ". Ranks run different programs or versions of smp.");
}

// What is no message for this rank ends the job: the leader waits for it within the step.
StepMessage receive_message(RankState& rank) {
  const std::string bytes = rank.context.pipeline->receive_bytes(0, runtime::kStepTag);
  const StepMessage message = runtime::or_end_the_job(*rank.context.world, [&] {
    StepMessage decoded = runtime::decode_step_message(bytes);
    check_is_for_us(rank, decoded);
    return decoded;
  });
  for (uint64_t hash : message.forgotten) rank.programs.erase(hash);
  return message;
}

void check_settings(const RankState& rank, const StepMessage& message) {
  if (message.settings.empty()) return;
  const std::vector<ModelSettings> own = settings_of(rank.models);
  TORCH_CHECK_VALUE(
      own == message.settings, "step: expected the same communication hooks and parameters with requires_grad ",
      "on all ranks of a pipeline, got ", describe(message.settings), " on pipeline rank 0 and ", describe(own),
      " on pipeline rank ", rank.context.pipeline->rank(), ". Register hooks, freeze and unfreeze on every rank alike.");
  const std::string optimizers = describe_optimizers(rank);
  TORCH_CHECK_VALUE(optimizers == message.optimizers,
                    differing_optimizers("step", message.optimizers, "pipeline rank 0", optimizers,
                                         "pipeline rank " + std::to_string(rank.context.pipeline->rank())));
}

void accept(RankState& rank, const StepMessage& message, int step_number) {
  TORCH_CHECK(message.step_function == step_number,
              "step: expected all ranks of a pipeline to call the same step function, got number ", message.step_function,
              " on pipeline rank 0 and number ", step_number, " on pipeline rank ", rank.context.pipeline->rank(),
              ". Make and call step functions in the same order.");
  for (const runtime::NewProgram& fresh : message.new_programs) {
    partitioner::Graph graph = partitioner::deserialise_graph(fresh.graph);
    partitioner::Plan plan = partitioner::deserialise_plan(fresh.plan, graph);
    TORCH_CHECK_VALUE(plan.num_ranks == rank.context.pipeline->size(), "step: expected a plan for ",
                      rank.context.pipeline->size(), " pipeline ranks, got one for ", plan.num_ranks,
                      ". Ranks run different programs or versions of smp.");
    partitioner::check(graph, plan);
    const auto program = rank.programs.add(std::move(graph), std::move(plan), fresh.hash);
    for (const auto& constant : fresh.constants) program->constants[constant.value] = constant.tensor;
  }
}

std::optional<step_internal::Results> follow_round(RankState& rank, StepRounds& rounds, const StepMessage& message,
                                                   int step_number) {
  return runtime::or_end_the_job(*rank.context.world, [&] {
    MicrobatchInputs none;
    if (message.round != Round::kShadow) accept(rank, message, step_number);
    check_settings(rank, message);
    return rounds.perform_round(message, none);
  });
}

void begin_recorded_step(Context& context) {
  if (context.timeline) context.timeline->recorder().begin_step();
}

void end_recorded_step(Context& context) {
  if (context.timeline && context.timeline->end_step()) context.timeline.reset();
}

void forget_ended_steps(RankState& rank) {
  for (const int number : std::exchange(rank.context.steps->ended, {})) {
    rank.captures.erase(number);
    rank.context.begun_steps.erase(number);
    std::erase_if(rank.auto_microbatches, [number](const auto& chosen) { return chosen.first.first == number; });
  }
}

step_internal::Results follow(RankState& rank, int step_number) {
  StepRounds rounds(rank);
  for (;;) {
    const StepMessage message = receive_message(rank);
    if (!message.error.empty()) {
      rounds.drop_from(0);
      if (message.round == Round::kJoined) rank.context.join->has_ended_early = true;
      throw_refusal(message);
    }
    if (auto returned = follow_round(rank, rounds, message, step_number)) return std::move(*returned);
  }
}

void take_over_from(RankState& rank, int replica) {
  for (const auto& model : rank.models.all()) {
    broadcast_over_replicas(rank, *model, replica, [](const runtime::NamedTensor&) { return true; });
  }
  for (const auto& alive : rank.live_optimizers()) broadcast_local_state(rank, *alive, replica);
}

int lead_join(RankState& rank) {
  for (;;) {
    const std::optional<int> over = in_step(rank, [&] {
      begin_recorded_step(rank.context);
      ReplicaMeeting meeting(rank, 0);
      const std::optional<int> source = meeting.shadow();
      end_recorded_step(rank.context);
      if (source) meeting.end_join(*source);
      return source;
    });
    if (over) return *over;
  }
}

// The replica that all take over from, once there are no more steps.
std::optional<int> follow_shadow(RankState& rank) {
  begin_recorded_step(rank.context);
  StepRounds rounds(rank);
  for (bool is_over = false; !is_over;) {
    const StepMessage message = receive_message(rank);
    if (message.round == Round::kJoined) {
      if (!message.error.empty()) throw_refusal(message);
      return message.first_active_replica;
    }
    is_over = !message.error.empty() || follow_round(rank, rounds, message, message.step_function).has_value();
  }
  end_recorded_step(rank.context);
  return std::nullopt;
}

int follow_join(RankState& rank) {
  for (;;) {
    if (const auto over = in_step(rank, [&] { return follow_shadow(rank); })) return *over;
  }
}

}  // namespace

step_internal::Results step_on_rank(RankState& rank, int step_number, const step_internal::Call& call) {
  TORCH_CHECK(rank.context.body_in_progress == nullptr,
              "step: expected a call outside of step bodies, got one from within a body. Call the step functions one after "
              "the other, or share a plain function between their bodies.");
  TORCH_CHECK_VALUE(!rank.context.join || !rank.context.join->has_ended_early,
                    "step: expected no more steps in a smp::join that has ended early, as throw_on_early_termination asks, "
                    "got one. Leave its loop.");
  forget_ended_steps(rank);
  std::optional<LongWaits> while_it_is_new;
  if (rank.context.begun_steps.insert(step_number).second) while_it_is_new.emplace(rank.context);
  return in_step(rank, [&] {
    measure_costs(rank, step_number, call);
    begin_recorded_step(rank.context);
    if (!rank.context.is_laid_out) lay_out(rank, step_number, call);
    auto returned = rank.leads() ? Leader(rank, step_number, call).lead() : follow(rank, step_number);
    end_recorded_step(rank.context);
    rank.context.has_started = true;
    return returned;
  });
}

void finish_join(RankState& rank) {
  const int source = rank.leads() ? lead_join(rank) : follow_join(rank);
  // Of this pipeline: those of other replicas may have no such difference.
  runtime::or_end_the_job(*rank.context.world, [&] {
    check_optimizers(rank, *rank.context.pipeline, "smp::join");
    take_over_from(rank, source);
  });
  forget_optimizer_steps(rank);
  for (const auto& model : rank.models.all()) model->reduction.num_passes = 0;  // replicas may be at different ones
}

}  // namespace smp::engine
