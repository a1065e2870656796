// Meetings, and the step of a replica that only meets.
#include "smp/engine/step/replica_meeting.h"

#include <algorithm>

#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/wire.h"
#include "smp/engine/optimizers/optimizer_settings.h"
#include "smp/engine/replicas/replica_gradients.h"
#include "smp/engine/step/step_rounds.h"

namespace smp::engine {

using runtime::Round;
using runtime::StepMessage;

namespace {

std::string text_of(const runtime::TensorHomes& homes) {
  std::string text;
  for (const auto& [name, home] : homes) {
    text += name;
    for (int rank : home.whole_on()) text += " " + std::to_string(rank);
    text += "\n";
  }
  return text;
}

}  // namespace

StepMessage ReplicaMeeting::new_message(Round round) const {
  StepMessage message{
      .step_function = step_number_, .step = rank_.training_steps, .evaluation_step = rank_.evaluation_steps};
  message.round = round;
  message.reduced = reductions(rank_.models);
  message.first_active_replica = first_active_;
  message.gradient_divisor = gradient_divisor_;
  return message;
}

bool ReplicaMeeting::is_due(bool is_last) const {
  return rank_.context.replicas->size() > 1 && (next_ == Next::kFirst || (next_ == Next::kLast && is_last));
}

bool ReplicaMeeting::ends_early() const {
  return rank_.context.join && rank_.context.join->options.throw_on_early_termination;
}

std::optional<Refusal> ReplicaMeeting::meet(const ReplicaStep& own, StepMessage& message) {
  all_ = runtime::gather(own, *rank_.context.replicas, "step of a replica");
  const bool one_reads = std::any_of(all_.begin(), all_.end(), [](const ReplicaStep& other) { return other.reads; });
  next_ = next_ == Next::kFirst && one_reads ? Next::kLast : Next::kNone;
  // Who has joined has nothing to say about buffers and the step, and may count in means.
  const auto is_active = [](const ReplicaStep& step) { return !step.has_joined; };
  const auto first = std::find_if(all_.begin(), all_.end(), is_active);
  if (first == all_.end()) return std::nullopt;  // there is no step
  first_active_ = static_cast<int32_t>(first - all_.begin());
  const bool by_all = !rank_.context.join || rank_.context.join->options.divide_by_initial_world_size;
  gradient_divisor_ = static_cast<int32_t>(by_all ? all_.size() : std::count_if(all_.begin(), all_.end(), is_active));
  message.first_active_replica = first_active_;
  message.gradient_divisor = gradient_divisor_;
  std::optional<Refusal> refusal = disagreement(all_, ends_early());
  if (!refusal) return refusal;
  next_ = Next::kNone;  // all know
  if (message.error.empty()) {
    message.error = refusal->text;
    message.is_value_error = refusal->is_value_error;
  }
  return refusal;
}

void ReplicaMeeting::meet(StepMessage& message, bool is_last, const runtime::TensorHomes& planned) {
  ReplicaStep own{.step_function = step_number_, .training_steps = message.step, .error = message.error};
  own.is_value_error = message.is_value_error;
  own.trains = message.trains;
  own.reduced = message.reduced;
  own.settings = message.settings;
  own.optimizers = message.optimizers;
  if (own.trains) own.asked = reductions(rank_.models);
  own.reads = !is_last;
  if (is_last && own.error.empty() && planned != rank_.models.homes()) own.homes = text_of(planned);
  const std::optional<Refusal> refusal = meet(own, message);
  if (is_last && own.trains) message.reduced = united_reductions(all_);
  if (refusal && refusal->ends_join) rank_.context.join->has_ended_early = true;
}

std::optional<int> ReplicaMeeting::shadow() {
  runtime::Transport& world = *rank_.context.world;
  ReplicaStep own;
  own.has_joined = true;
  own.joined_after = rank_.context.join->num_steps;
  own.reduced = reductions(rank_.models);
  own.settings = settings_of(rank_.models);
  StepMessage message = new_message(Round::kShadow);
  const auto refused = [&] { return runtime::or_end_the_job(world, [&] { return meet(own, message).has_value(); }); };
  const bool is_refused = refused();
  if (const auto source = most_steps_of_joined(all_)) return source;
  if (is_refused) {
    if (!ends_early()) return std::nullopt;
    message.round = Round::kJoined;
    tell_followers(rank_, message);
    throw_refusal(message);
  }
  StepRounds rounds(rank_);
  const auto perform = [&](const StepMessage& round) {
    tell_followers(rank_, round);
    MicrobatchInputs none;
    runtime::or_end_the_job(world, [&] { return rounds.perform_round(round, none); });
  };
  if (comes_again()) {
    StepMessage begin = message;
    begin.round = Round::kForward;
    perform(begin);
    if (refused()) {
      tell_followers(rank_, message);
      return std::nullopt;
    }
  }
  const ReplicaStep& active = all_[static_cast<size_t>(first_active_)];
  message.trains = active.trains;
  message.step = active.training_steps;
  message.reduced = united_reductions(all_);
  message.settings = own.settings;
  message.optimizers = describe_optimizers(rank_);
  perform(message);
  return std::nullopt;
}

void ReplicaMeeting::end_join(int source) const {
  StepMessage message = new_message(Round::kJoined);
  message.first_active_replica = source;
  tell_followers(rank_, message);
}

}  // namespace smp::engine
