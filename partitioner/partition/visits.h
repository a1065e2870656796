// Placement by parameters: the rank of every block when most are fixed. Balances nothing.
#pragma once

#include <vector>

#include "partitioner/partition/pins.h"

namespace smp::partitioner {

/// The rank of every block such that each is allowed and the changes of rank along the program cost
/// least: blocks without parameters go to the neighbour with which they exchange most.
///
/// A change before block b costs `switch_us[b]`; to a lower rank `step_back_us` more, because the
/// microbatch then travels the pipeline once more. Ties keep the rank, then prefer the lower one.
/// Exact, O(blocks * ranks): Viterbi's shortest path with one price per direction.
std::vector<int> cheapest_ranks(const std::vector<RankSet>& allowed, const std::vector<double>& switch_us,
                                double step_back_us, int num_ranks);

}  // namespace smp::partitioner
