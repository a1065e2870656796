// Which of the recorded steps stands for all.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "partitioner/report/timeline.h"

namespace smp::partitioner {

/// Of the steps of a replica that have performed one table, those of the table performed most often (of several, the one
/// with most actions); of these the one whose duration is the median, of two the shorter. nullopt: no step has performed a
/// table.
std::optional<size_t> typical_step(const std::vector<RankTimeline>& ranks, int replica);

}  // namespace smp::partitioner
