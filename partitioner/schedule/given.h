// Tables of given columns: computations by rank, in an order that may come with a plan as data.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "partitioner/plan/action.h"
#include "partitioner/schedule/microbatch_graphs.h"
#include "partitioner/schedule/schedule.h"

namespace smp::partitioner {

/// The table of the computations `columns`, with transfers around them; its limits are what each stage holds at most. None
/// where the columns are for another number of microbatches, or the microbatches of several programs (pointers).
///
/// Throws c10::ValueError for columns of another number of ranks, what is no computation of its rank, and columns that wait
/// for each other for ever. Prove the rest with check().
std::optional<Schedule> given_schedule(const std::vector<std::vector<Action>>& columns,
                                       std::span<const StageGraph* const> graph_of_microbatch);

/// The same of columns of this step's computations, each on its rank.
Schedule schedule_of(const std::vector<std::vector<Action>>& columns, const MicrobatchGraphs& graphs);

}  // namespace smp::partitioner
