// The entry to planning: which rank runs which operators of a captured step. Pure: no ranks, no
// communication.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "partitioner/cost/device_model.h"
#include "partitioner/cost/measured_costs.h"
#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

struct PartitionOptions {
  int num_ranks = 1;
  int num_microbatches = 1;
  int num_replicas = 1;  // of the plan: they wait for each other at the end of a step
  ScheduleOptions schedule;         // stage s lies on rank s % num_ranks
  bool chooses_visits = false;      // schedule.virtual_stages, which is 1 then
  bool exact_ties = false;          // Plan::exact_ties
  int64_t memory_limit_bytes = -1;  // per rank; -1: none
  /// By pipeline rank; empty: the same for all. A rank of speed 0.5 takes twice as long for each
  /// operator as `device` says; its messages take as long. A limit of -1 is none.
  std::vector<double> rank_speed;
  std::vector<int64_t> rank_memory_limit_bytes;  // in place of memory_limit_bytes
  DeviceModel device;
  const MeasuredCosts* measured = nullptr;  // in place of what `device` predicts; borrowed
  double optimizer_state_factor = 0;  // state in units of the parameters: 0 SGD, 1 momentum, 2 Adam
  double optimizer_workspace_factor = 0;  // of its step, in units of the parameter being updated
  int64_t gradient_bucket_bytes = 0;  // averaged over replicas at once; 0: there are no replicas
  bool gradients_overlap = true;      // buckets leave during the last backward; false: at the end
  bool gradients_share_memory = false;  // a bucket lies in a block that stays, where other replicas read it
  int num_gradient_blocks = 1;          // then: one for each model
  /// Stages run from tapes: gradients leave before those of parameters are made, and in one step the
  /// last microbatch runs twice (rank_memory.h).
  bool tapes = false;

  /// Module path or parameter name ("encoder.layers.3") -> rank; the longest matching prefix wins,
  /// "" matches all.
  std::map<std::string, int> pins;
  bool auto_partition = true;
  int default_partition = 0;  // of parameters without a pin, when auto_partition is false

  /// Placement that exists already: parameter or buffer name -> ranks that hold it. If not empty,
  /// operators follow their parameters and nothing is balanced; names that are missing are placed
  /// by `pins`.
  std::map<std::string, std::vector<int>> owners;
  /// Parameter name -> the one of its owners that adds up its gradient in other programs: where a plan
  /// with exact ties has its first reader, since microbatches of one step may run several programs.
  std::map<std::string, int> homes;
  /// Every module path of the model, beyond those that the graph shows; a pin to one of them is no
  /// mistake.
  std::vector<std::string> known_modules;

  int num_stages() const { return num_ranks > 1 ? num_ranks * schedule.virtual_stages : 1; }
  double speed_of(int rank) const {
    return rank_speed.empty() ? 1 : rank_speed[static_cast<size_t>(rank)];
  }
  int64_t limit_of(int rank) const {
    return rank_memory_limit_bytes.empty() ? memory_limit_bytes
                                           : rank_memory_limit_bytes[static_cast<size_t>(rank)];
  }
};

/// Assigns every node of `graph` to a stage and every stage to a rank.
///
/// Automatic partitioning gives stage s to rank s, or to rank s % num_ranks with several visits. It
/// lays the operators out in a few orders (linearise.h), splits each so that the slowest stage is
/// as fast as possible (contiguous.h), and of the splits that are nearly as good as the best takes
/// the one whose simulated step is the shortest. With several visits the cuts of each split go where
/// that step is shorter still (shift_cuts.h), and of all the shortest is taken. Pins keep program
/// order. Pins that no such split meets, auto_partition = false, and existing owners give visits: the
/// order is cut where the rank changes, at the places with the least traffic.
///
/// With chooses_visits there are more visits than one where the planner is free to cut, the schedule
/// can take them round after round, and the step is predicted to be a hundredth shorter, or more.
///
/// Throws c10::ValueError for options out of range, a pin to an unknown module or rank, operators
/// that must share a stage but are pinned to several ranks, pins with virtual_stages > 1, and a
/// memory limit that nothing meets.
Plan partition(const Graph& graph, const PartitionOptions& options);

}  // namespace smp::partitioner
