// Makes the table of a step out of its stage graphs: one generator for every kind of schedule.
#pragma once

#include <span>
#include <vector>

#include "partitioner/schedule/schedule.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

/// Time of one stage for one microbatch; any unit for the generator, microseconds for the
/// simulator.
struct StageTime {
  double forward_us = 1;
  double backward_us = 1;
  double rest_us = 0;  // of the backward, behind the gradients that leave the stage
  bool operator==(const StageTime&) const = default;
};

struct ScheduleOptions {
  /// Interleaved only: microbatches that the first stage may hold. 0: the number of ranks (1F1B on
  /// a chain).
  int active_microbatches = 0;
  /// By stage number, whatever the program; empty: all equal, which gives the tables of the
  /// literature.
  std::vector<StageTime> times;
  /// Visits of each rank; 0: as many stages as there are for each rank. Above 1, interleaved and with
  /// active_microbatches 0: where stage s lies on rank s % num_ranks in that many rounds, and
  /// num_ranks divides the number of microbatches, Megatron's interleaved 1F1B (looped.h).
  int virtual_stages = 1;
};

/// The largest number of microbatches that `stage` may hold between forward and backward, by stage.
///
/// Interleaved: max(1, A - s) with one stage per rank; with several, s is scaled by num_ranks /
/// num_stages, since a microbatch then passes that many stages in the time in which each rank
/// completes one microbatch. Simple: all of them.
std::vector<int> in_flight_limits(ScheduleKind kind, int num_ranks, int num_stages,
                                  int num_microbatches, int active_microbatches = 0);

/// The schedule of one step; `graph_of_microbatch[m]` is the stage graph of microbatch m. One
/// pointer is one program. Microbatches of different programs may have any stages on the same
/// ranks.
///
/// An event simulation: whenever a rank is free it takes its best ready task (backward before
/// forward, then the lowest microbatch, then the deepest stage). Each stage takes its forwards and
/// its backwards in microbatch order, so that gradients accumulate in order. Between programs each
/// rank as a whole does so, since a parameter may be read by one stage here and another there; a
/// stage counts what other programs hold on its rank towards its limit. Transfers stand
/// directly after the action that makes their values and directly before the action that reads
/// them.
///
/// Where options.virtual_stages asks for it, the ranks take their tasks in the order of looped.h,
/// and the limits of the schedule are what each stage holds at most.
///
/// It always ends, for every acyclic graph and every limit >= 1. Interleaved: let m be the lowest
/// unfinished microbatch. No task of m waits for a later microbatch, and a stage still to run F(m)
/// holds nothing, nor do other programs on its rank, so some task of m is ready. Simple: forwards
/// wait for forwards only, and the backwards start when those are done.
///
/// Throws c10::ValueError for no microbatch, differing numbers of ranks, or options that do not
/// fit.
Schedule generate(ScheduleKind kind, std::span<const StageGraph* const> graph_of_microbatch,
                  const ScheduleOptions& options = {});

/// The same graph for `num_microbatches` microbatches.
Schedule generate(ScheduleKind kind, const StageGraph& graph, int num_microbatches,
                  const ScheduleOptions& options = {});

}  // namespace smp::partitioner
