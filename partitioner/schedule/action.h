// One entry of a schedule: what a rank does next. Plain data; knows no tensors and no transport.
#pragma once

#include <string>

namespace smp::partitioner {

enum class ActionKind {
  kForward,
  kBackward,
  kSendActivation,
  kReceiveActivation,
  kSendGradient,
  kReceiveGradient,
};

/// One action of one rank, for one microbatch.
///
/// A transfer moves, in one go, every value that the plan lists between its two stages for that
/// microbatch. The step's inputs are sent by pipeline rank 0 under `stage == kInputStage` (-1).
struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;  // the stage that performs it
  int microbatch = 0;
  int peer =
      -1;  // transfers: the stage at the other end; -1 (kInputStage): the leader's step inputs

  bool is_compute() const;  // forward or backward
  bool is_send() const;
  bool is_receive() const;
  bool is_activation() const;  // a transfer of the forward direction
  bool operator==(const Action&) const = default;
};

/// "2F0": stage 2, forward of microbatch 0. Sends "2F0>3" (to stage 3), receives "3<2F0" (from
/// stage 2), gradients with B; the step inputs are stage "in": "inF0>3", "3<inF0".
std::string to_string(const Action& action);

/// The same without the performing stage, for a row that belongs to one stage: "F0", "F0>3",
/// "<2F0".
std::string to_string_within_stage(const Action& action);

}  // namespace smp::partitioner
