// The exact split of a chain of operators into consecutive stages. Knows numbers only, no graph.
#pragma once

#include <cstdint>
#include <vector>

namespace smp::partitioner {

/// What is sent of one value, or of its gradient. A stage pays for a message that it sends and for
/// one that it receives; one that passes by on its way from an earlier stage to a later one is
/// free.
struct Crossing {
  int made_at = 0;           // operator
  std::vector<int> read_at;  // operators, ascending, behind made_at
  double us = 0;             // of one message at either end, >= 0
  /// false: the stage that makes it sends it to every other stage that reads it. true: as gradients
  /// go, from the last reading stage to the one before it, and so on down to the one that made it.
  bool is_relayed = false;
};

/// A chain of n operators to be split into K consecutive stages. Position p lies before operator p.
///
/// A stage costs the sum of its time_us * slowness and the messages that it sends and receives, and
/// holds the sum of fixed_bytes + in_flight * sum of activation_bytes.
struct Chain {
  struct StageLimits {
    int64_t in_flight = 1;      // microbatches whose activations are alive at once, >= 0
    int64_t memory_bytes = -1;  // -1: no limit
    double slowness = 1;        // > 0; 2: a rank of half the speed
  };

  std::vector<double> time_us;            // n, forward and backward of one microbatch, >= 0
  std::vector<int64_t> fixed_bytes;       // n, parameters, gradients, optimizer state
  std::vector<int64_t> activation_bytes;  // n, saved for backward, per microbatch in flight
  std::vector<Crossing> crossings;        // in any order
  std::vector<char> cut_allowed;          // n + 1; entries 0 and n are not read
  std::vector<StageLimits> stages;        // K >= 1
  std::vector<int> first_stage;           // n or empty: the operator lies on this stage or later
  std::vector<int> last_stage;            // n or empty: the operator lies on this stage or earlier

  int num_operators() const { return static_cast<int>(time_us.size()); }
  int num_stages() const { return static_cast<int>(stages.size()); }
};

struct ChainSplit {
  std::vector<int> cuts;    // K + 1 positions; stage s is [cuts[s], cuts[s + 1])
  int num_used_stages = 0;  // stages from here on are empty: too few operators or allowed cuts
  double slowest_stage_us = 0;
  double least_us = 0;        // no split within the limits has a faster slowest stage
  double lower_bound_us = 0;  // max(total / sum of speeds, heaviest operator on the fastest)
};

/// Splits `chain` so that the slowest stage is as fast as possible.
///
/// Every stage is non-empty as long as operators, allowed cuts and pins permit; otherwise as many
/// as possible are used and the trailing ones stay empty. Among the optimal splits the one with the
/// fewest microseconds of messages is taken, then the one with the earliest cuts, last cut first:
/// the result is a function of the input. About 20 probes, see chain_probe.h.
///
/// What a stage costs follows from where it begins and ends, but for a value that it sends to
/// several stages: how many these are depends on all later cuts. A first search counts one message,
/// which no split goes below: `least_us`. Where its split costs more than that, a second one counts
/// as many as that split sends, and the better of the two is taken. So the split is optimal where
/// slowest_stage_us == least_us, and always where no value is read on several later stages;
/// otherwise it is at most by their quotient from the optimum.
///
/// Throws c10::ValueError when vectors disagree in length, when pins leave no split, and when no
/// split fits in memory; the last names the smallest limit that works.
ChainSplit split_chain(const Chain& chain);

/// Whether some split meets the pins and allowed cuts, memory aside.
bool pins_leave_a_split(const Chain& chain);

/// The least number of bytes by which every limited stage must grow until a split fits; 0 if one
/// does. The pins must leave a split.
int64_t smallest_memory_growth(const Chain& chain);

}  // namespace smp::partitioner
