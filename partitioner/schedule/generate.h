// Makes the table of a step out of its stage graphs: by a simulation in ticks, or of looped columns.
#pragma once

#include <span>
#include <vector>

#include "partitioner/plan/schedule_options.h"
#include "partitioner/schedule/schedule.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

/// The largest number of microbatches that `stage` may hold between forward and weight gradients, by stage.
///
/// Interleaved: max(1, A - s) with one stage per rank, and never more than there are; with several, s is scaled by num_ranks
/// / num_stages, since a microbatch then passes that many stages in the time in which each rank completes one microbatch.
/// Simple: all of them.
std::vector<int> in_flight_limits(const ScheduleOptions& options, int num_ranks, int num_stages, int num_microbatches);

/// The schedule of one step; `graph_of_microbatch[m]` is the stage graph of microbatch m. One pointer is one program.
/// Microbatches of different programs may have any stages on the same ranks.
///
/// A simulation in ticks: whenever a rank is free it takes its best ready task (backward before forward, then the lowest
/// microbatch, then the deepest stage). Each stage takes its forwards and its backwards in microbatch order, so that
/// gradients accumulate in order. Between programs each rank as a whole does so, since a parameter may be read by one stage
/// here and another there; a stage counts what other programs hold on its rank towards its limit. A forward takes as long as
/// a backward with its weight gradients, which stand behind the gradients that leave. Transfers stand directly after the
/// action that makes their values and directly before the action that reads them.
///
/// Where options.virtual_stages asks for it, the ranks take their tasks in the order of looped.h,
/// and the limits of the schedule are what each stage holds at most.
///
/// It always ends, for every acyclic graph and every limit >= 1. Interleaved: let m be the lowest unfinished microbatch. No
/// task of m waits for a later microbatch, and a stage still to run F(m) holds nothing, nor do other programs on its rank,
/// so some task of m is ready. Simple: forwards wait for forwards only, and the backwards start when those are done.
///
/// Throws c10::ValueError for no microbatch, or differing numbers of ranks.
Schedule generate(const ScheduleOptions& options, std::span<const StageGraph* const> graph_of_microbatch);

/// The same graph for `num_microbatches` microbatches.
Schedule generate(const ScheduleOptions& options, const StageGraph& graph, int num_microbatches);

}  // namespace smp::partitioner
