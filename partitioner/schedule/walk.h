// Performs a schedule in the abstract: the order in which things can happen. Internal to the
// schedule room.
#pragma once

#include <cstddef>
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

struct ActionHash {
  size_t operator()(const Action& action) const;
};

/// The action at the other end of a transfer: the receive of a send, the send of a receive.
Action counterpart(const Action& transfer);

/// Called for each action; for a receive, `sender` is where its message was sent, otherwise `at`.
using Perform = std::function<void(Position at, Position sender)>;

/// Performs columns from first to last, each receive after its send; sends are buffered.
/// Returns where ranks wait for ever, in rank order: empty if all is done.
std::vector<Position> walk(const Schedule& schedule, const Perform& perform);

}  // namespace smp::partitioner
