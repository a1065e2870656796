// Text form of an action.
#include "partitioner/schedule/action.h"

#include "partitioner/plan/plan.h"

namespace smp::partitioner {
namespace {

std::string stage_name(int stage) { return stage == kInputStage ? "in" : std::to_string(stage); }

std::string work(const Action& action) {
  const bool is_forward = action.kind == ActionKind::kForward || action.is_activation();
  return std::string(is_forward ? "F" : "B").append(std::to_string(action.microbatch));
}

}  // namespace

bool Action::is_compute() const {
  return kind == ActionKind::kForward || kind == ActionKind::kBackward;
}

bool Action::is_send() const {
  return kind == ActionKind::kSendActivation || kind == ActionKind::kSendGradient;
}

bool Action::is_receive() const {
  return kind == ActionKind::kReceiveActivation || kind == ActionKind::kReceiveGradient;
}

bool Action::is_activation() const {
  return kind == ActionKind::kSendActivation || kind == ActionKind::kReceiveActivation;
}

std::string to_string(const Action& action) {
  return stage_name(action.stage) + to_string_within_stage(action);
}

std::string to_string_within_stage(const Action& action) {
  if (action.is_send()) return work(action) + ">" + stage_name(action.peer);
  if (action.is_receive())
    return std::string("<").append(stage_name(action.peer)).append(work(action));
  return work(action);
}

}  // namespace smp::partitioner
