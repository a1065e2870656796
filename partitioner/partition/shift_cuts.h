// Splits for several visits: equally busy ranks rather than equal stages.
#pragma once

#include "partitioner/partition/chain_of_graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// `plan`, made of `order` with several stages for each rank, or one whose step is predicted to be shorter.
///
/// The chain's split makes the slowest stage as fast as possible (contiguous.h). With several visits a rank is as busy as
/// all its stages together, and the step can be shorter where these differ: so one cut after the other, and two neighbours
/// together, go where the simulated step is the shortest, until no place that is tried is better. A local search among at
/// most a few dozen places at a time, and of a limited number of simulations: no bound, but never worse. Plans over a memory
/// limit are not taken.
Plan with_shifted_cuts(const PlanInput& input, const Linearisation& order, Plan plan);

}  // namespace smp::partitioner
