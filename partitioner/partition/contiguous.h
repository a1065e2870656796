// The exact split of a chain of operators into consecutive stages. Knows numbers only, no graph.
#pragma once

#include <cstdint>
#include <vector>

#include "partitioner/partition/chain.h"

namespace smp::partitioner {

struct ChainSplit {
  std::vector<int> cuts;    // K + 1 positions; stage s is [cuts[s], cuts[s + 1])
  int num_used_stages = 0;  // stages from here on are empty: too few operators or allowed cuts
  double slowest_stage_us = 0;
  double least_us = 0;  // no split within the limits has a faster slowest stage
};

/// Splits `chain` so that the slowest stage is as fast as possible.
///
/// Every stage is non-empty as long as operators, allowed cuts and pins permit; otherwise as many
/// as possible are used and the trailing ones stay empty. Among the optimal splits the one with the
/// fewest microseconds of messages is taken, then the one with the earliest cuts, last cut first:
/// the result is a function of the input.
///
/// What a stage costs follows from where it begins and ends, but for a value that it sends to
/// several stages: how many these are depends on all later cuts. A first search counts one message,
/// which no split goes below: `least_us`. Where its split costs more than that, a second one counts
/// as many as that split sends, and the better of the two is taken. So the split is optimal where
/// slowest_stage_us == least_us, and always where no value is read on several later stages;
/// otherwise it is at most by their quotient from the optimum.
///
/// Expects that pins leave a split, and that one fits in memory.
ChainSplit split_chain(const Chain& chain);

/// Whether some split meets the pins and allowed cuts, memory aside.
bool pins_leave_a_split(const Chain& chain);

/// The least number of bytes by which every limited stage must grow until a split fits; 0 if one
/// does. The pins must leave a split.
int64_t smallest_memory_growth(const Chain& chain);

}  // namespace smp::partitioner
