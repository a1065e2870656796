// Reads layer profiles in PipeDream's text format and lays them out as a chain.
#pragma once

#include <string>
#include <vector>

#include "partitioner/partition/contiguous.h"

namespace smp::testing {

/// One measured model; nodes in a topological order, `edges` as (from, to) positions in it.
struct Profile {
  struct Node {
    std::string layer;
    double forward_us = 0;
    double backward_us = 0;
    double activation_bytes = 0;
    double parameter_bytes = 0;
  };
  std::vector<Node> nodes;
  std::vector<std::pair<int, int>> edges;
};

/// Lines "node7 -- ReLU -- forward_compute_time=…" (milliseconds), then "\tnode7 -- node8".
/// Throws c10::ValueError for a file that is missing, empty or has a cycle.
Profile read_profile(const std::string& path);

/// Messages, forward and backward, take their bytes at `gigabytes_per_second`. Activations are not counted as memory: in
/// these files they are outputs, not what autograd saves.
partitioner::Chain chain_of(const Profile& profile, int num_stages, double gigabytes_per_second);

}  // namespace smp::testing
