// What the leaders of the replicas do together in a step. Owns when they meet, and what messages say of it.
#pragma once

#include <optional>
#include <vector>

#include "runtime/exchange/step_protocol.h"
#include "runtime/placement/placement.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/engine/replicas/replica_step.h"

namespace smp::engine {

/// They meet before the first message of a step, and where one of them reads values once more at its end. They see each
/// other's refusals, whether all run the same step, and whether all place their models alike. The followers see nothing of
/// it: they wait for a message of this rank.
class ReplicaMeeting {
 public:
  ReplicaMeeting(RankState& rank, int step_number) : rank_(rank), step_number_(step_number) {}

  /// A message of this step, with what the meetings so far say.
  runtime::StepMessage new_message(runtime::Round round) const;
  /// Whether this leader meets the others now. `is_last`: at the end of its step, else where its body reads.
  bool is_due(bool is_last) const;
  /// Completes `message`; `planned`: the placement behind it. It has an error where they cannot run the step together.
  void meet(runtime::StepMessage& message, bool is_last, const runtime::TensorHomes& planned);
  /// Whether this step ends with another meeting, since one of them reads.
  bool comes_again() const { return next_ == Next::kLast; }

  /// For a replica that has no batch left: takes part in one step of those that have, and in as many meetings as each of
  /// them. When none has any, returns the one with the most steps.
  std::optional<int> shadow();
  /// Tells the followers so.
  void end_join(int source) const;

 private:
  enum class Next { kFirst, kLast, kNone };

  bool ends_early() const;
  std::optional<Refusal> meet(const ReplicaStep& own, runtime::StepMessage& message);

  RankState& rank_;
  int step_number_;
  Next next_ = Next::kFirst;
  std::vector<ReplicaStep> all_;  // what each said last
  int32_t first_active_ = 0, gradient_divisor_ = 1;
};

}  // namespace smp::engine
