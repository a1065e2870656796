// Random chains for split_chain, and the slow answers that it is compared with.
#pragma once

#include <optional>
#include <random>
#include <vector>

#include "partitioner/partition/contiguous.h"

namespace smp::testing {

/// What a random chain may contain besides times.
struct ChainTraits {
  int max_operators = 10;
  int max_stages = 5;
  bool has_traffic = true;
  int most_readers = 1;  // of a value; its gradient may come from more
  bool has_forbidden_cuts = true;
  bool has_pins = true;
  bool has_memory_limits = true;
};

/// Whole numbers, so that every order of summation gives the same double.
partitioner::Chain random_chain(std::mt19937& random, const ChainTraits& traits);

/// A chain without traffic, pins and limits.
partitioner::Chain plain_chain(const std::vector<double>& time_us, int num_stages);

struct ReferenceSplit {
  int num_used_stages = 0;
  double slowest_stage_us = 0;
  double traffic_us = 0;
  std::vector<int> cuts;  // num_used_stages + 1
};

/// By trying every set of cuts: most stages, then fastest, then least traffic, then earliest cuts
/// from the back. None if nothing is feasible.
std::optional<ReferenceSplit> split_exhaustively(const partitioner::Chain& chain);

/// By the quadratic table over (stage, position); stages and slowest stage only, each value sent once.
/// None if nothing is feasible.
std::optional<ReferenceSplit> split_by_table(const partitioner::Chain& chain);

/// max(total / sum of speeds, heaviest operator on the fastest): no split is faster.
double lower_bound_us(const partitioner::Chain& chain);

/// The slowest stage between `cuts`, with all messages; infinity where cuts, pins or memory forbid one.
double reference_slowest_us(const partitioner::Chain& chain, const std::vector<int>& cuts);

}  // namespace smp::testing
