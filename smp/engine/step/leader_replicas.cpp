// What the leaders of the replicas do together.
#include <c10/util/Exception.h>

#include <algorithm>

#include "smp/engine/optimizers/optimizer_settings.h"
#include "smp/engine/replicas/replica_gradients.h"
#include "smp/engine/step/captured_runs.h"
#include "smp/engine/step/leader.h"

namespace smp::engine {

using runtime::Round;
using runtime::StepMessage;

namespace {

// Each once. Bodies that are alike have one recording.
std::vector<std::shared_ptr<Program>> programs_of(const RankState& rank, const std::vector<runtime::CapturedBody>& bodies) {
  std::vector<std::shared_ptr<Program>> programs;
  const runtime::Recording* last = nullptr;
  for (const runtime::CapturedBody& body : bodies) {
    if (body.recording.get() == last) continue;
    last = body.recording.get();
    programs.push_back(rank.programs.find(last->hash));
  }
  return programs;
}

}  // namespace

std::string Leader::new_homes() const {
  if (planned_ == rank_.models.homes()) return "";
  std::string text;
  for (const auto& [name, home] : planned_) {
    text += name;
    for (int rank : home.whole_on()) text += " " + std::to_string(rank);
    text += "\n";
  }
  return text;
}

// Who has joined has nothing to say about buffers and the step, and may count in means.
void Leader::follow_active(const std::vector<ReplicaStep>& all, StepMessage& message) {
  const auto is_active = [](const ReplicaStep& step) { return !step.has_joined; };
  const auto first = std::find_if(all.begin(), all.end(), is_active);
  message.first_active_replica = first_active_replica_ = static_cast<int32_t>(first - all.begin());
  const bool by_all = !rank_.context.join || rank_.context.join->options.divide_by_initial_world_size;
  gradient_divisor_ = static_cast<int32_t>(by_all ? all.size() : std::count_if(all.begin(), all.end(), is_active));
  message.gradient_divisor = gradient_divisor_;
}

// The followers see nothing of it: they wait for a message of this rank.
std::vector<ReplicaStep> Leader::meet(const ReplicaStep& own) {
  return or_fail([&] { return gather(own, *rank_.context.replicas); });
}

bool Leader::ends_early() const { return rank_.context.join && rank_.context.join->options.throw_on_early_termination; }

// The leaders of the replicas meet before the first message of a step, and where one of them reads values once more at its
// end. They see each other's refusals, whether all run the same step, and whether all place their models alike.
void Leader::meet_replicas(StepMessage& message, bool is_last) {
  if (is_last && message.trains && message.error.empty()) {
    const auto programs = programs_of(rank_, bodies_);
    message.error = hook_on_parts(programs, rank_.models.bindings());
    message.reduced = reductions(rank_.models, programs);
    if (rank_.context.world->size() > 1) {
      message.settings = describe_settings(rank_.models);
      message.optimizers = describe_optimizers(rank_);
    }
  }
  runtime::Transport& replicas = *rank_.context.replicas;
  const Meeting meeting = next_meeting_;
  if (replicas.size() == 1 || meeting == Meeting::kNone || (meeting == Meeting::kLast && !is_last)) return;
  ReplicaStep own{.step_function = step_number_, .training_steps = message.step, .error = message.error};
  own.is_value_error = message.is_value_error;
  own.trains = message.trains;
  own.reduced = message.reduced;
  own.settings = message.settings;
  own.optimizers = message.optimizers;
  if (own.trains) own.asked = reductions(rank_.models);
  own.reads = !is_last;
  if (is_last && own.error.empty()) own.homes = new_homes();
  const std::vector<ReplicaStep> all = meet(own);
  const bool one_reads = std::any_of(all.begin(), all.end(), [](const ReplicaStep& other) { return other.reads; });
  next_meeting_ = meeting == Meeting::kFirst && one_reads ? Meeting::kLast : Meeting::kNone;
  follow_active(all, message);
  if (is_last && own.trains) message.reduced = united_reductions(all);
  const std::optional<Refusal> refusal = disagreement(all, ends_early());
  if (refusal && refusal->ends_join) rank_.context.join->has_ended_early = true;
  if (refusal && message.error.empty()) {
    message.error = refusal->text;
    message.is_value_error = refusal->is_value_error;
  }
  if (!is_last && refusal) {
    next_meeting_ = Meeting::kNone;  // all know
    refusal_ = message;
    throw_refusal(message);
  }
  if (!is_last || next_meeting_ == Meeting::kNone || refusal) return;
  // Another replica reads. This one begins with it, and then waits for how that ends.
  StepMessage begin = message;
  begin.round = Round::kForward;
  begin.microbatches.clear();
  perform(begin);
  message.new_programs.clear();
  meet_replicas(message, /*is_last=*/true);
}

// The replica has no batch left. It meets the others as often as each of them meets all: at the start of a step, and where
// one reads once more at its end.
std::optional<int> Leader::shadow() {
  ReplicaStep own;
  own.has_joined = true;
  own.joined_after = rank_.context.join->num_steps;
  own.reduced = reductions(rank_.models);
  own.settings = describe_settings(rank_.models);
  std::vector<ReplicaStep> all = meet(own);
  if (const auto source = most_steps_of_joined(all)) return source;
  StepMessage message = new_message(Round::kShadow, 0);
  const auto refused = [&] {
    const auto refusal = disagreement(all, ends_early());
    if (refusal) message.error = refusal->text, message.is_value_error = refusal->is_value_error;
    return refusal.has_value();
  };
  if (refused()) {
    if (!ends_early()) return std::nullopt;
    message.round = Round::kJoined;
    send(message);
    throw_refusal(message);
  }
  follow_active(all, message);
  const bool reads = std::any_of(all.begin(), all.end(), [](const ReplicaStep& other) { return other.reads; });
  if (reads) {
    StepMessage begin = message;
    begin.round = Round::kForward;
    perform(begin);
    all = meet(own);
    if (refused()) {
      send(message);
      return std::nullopt;
    }
  }
  const ReplicaStep& active = all[static_cast<size_t>(message.first_active_replica)];
  message.trains = active.trains;
  message.step = active.training_steps;
  message.reduced = united_reductions(all);
  message.settings = own.settings;
  message.optimizers = describe_optimizers(rank_);
  perform(message);
  return std::nullopt;
}

void Leader::end_join(int source) {
  StepMessage message = new_message(Round::kJoined, 0);
  message.first_active_replica = source;
  send(message);
}

}  // namespace smp::engine
