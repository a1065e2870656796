// A chain of operators as numbers: what each takes and holds, and what is sent between them.
#pragma once

#include <cstdint>
#include <vector>

namespace smp::partitioner {

/// What is sent of one value, or of its gradient. A stage pays for a message that it sends and for one that it receives; one
/// that passes by on its way from an earlier stage to a later one is free.
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

}  // namespace smp::partitioner
