// Performs a schedule in the abstract: the order in which things can happen, and whether they end.
#pragma once

#include <functional>
#include <vector>

#include "partitioner/schedule/schedule.h"

namespace smp::partitioner {

/// One cell of the table.
struct Position {
  int rank = 0;
  int index = 0;  // in the rank's column
  bool operator==(const Position&) const = default;
};

/// Called for each action; for a receive, `sender` is where its message was sent, otherwise `at`.
using Perform = std::function<void(Position at, Position sender)>;

/// Performs columns from first to last, each receive after its send; sends are buffered.
/// Returns where ranks wait for ever, in rank order: empty if all is done.
std::vector<Position> walk(const Schedule& schedule, const Perform& perform);

/// True when no rank waits for ever, although each send waits until its receiver has come to all but send_limit() - 1 of the
/// messages before it. Expects a table that passes check(), of microbatches of one program.
bool may_limit_sends(const Schedule& schedule);

}  // namespace smp::partitioner
