// Tables that come with a plan as data: computations by rank, in an order that no generator here makes.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "partitioner/plan/action.h"
#include "partitioner/schedule/schedule.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

/// The table of the computations `columns`, with transfers around them; its limits are what each stage holds at most. None
/// where the columns are for another number of microbatches, or the microbatches of several programs (pointers).
///
/// Throws c10::ValueError for columns of another number of ranks, what is no computation of its rank, computations that are
/// missing or stand twice, and columns that wait for each other for ever. Prove the rest with check().
std::optional<Schedule> given_schedule(const std::vector<std::vector<Action>>& columns,
                                       std::span<const StageGraph* const> graph_of_microbatch);

}  // namespace smp::partitioner
