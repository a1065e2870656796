// What a plan is made for: what the user asked for, what the machine is, how the runtime behaves, and what lies where.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "partitioner/cost/device_model.h"
#include "partitioner/cost/measured_costs.h"
#include "partitioner/plan/home.h"
#include "partitioner/plan/schedule_options.h"

namespace smp::partitioner {

/// What the user asked for: how ranks work together, and what they may hold.
struct PlanRequest {
  int num_ranks = 1;
  int num_microbatches = 1;
  int num_replicas = 1;                          // of the plan
  ScheduleOptions schedule;                      // stage s lies on rank s % num_ranks
  bool chooses_visits = false;                   // schedule.virtual_stages, which is 1 then
  bool exact_ties = false;                       // Plan::exact_ties
  int64_t memory_limit_bytes = -1;               // per rank; -1: none
  std::vector<int64_t> rank_memory_limit_bytes;  // by pipeline rank, in place of it; empty: the same for all
  bool chooses_recomputation = false;            // where a limit would be broken, or kept by slower cuts

  int num_stages() const { return num_ranks > 1 ? num_ranks * schedule.virtual_stages : 1; }
  int64_t limit_of(int rank) const {
    return rank_memory_limit_bytes.empty() ? memory_limit_bytes : rank_memory_limit_bytes[static_cast<size_t>(rank)];
  }
};

/// What the machine is.
struct Machine {
  DeviceModel device;
  const MeasuredCosts* measured = nullptr;  // in place of what `device` predicts; borrowed
  /// By pipeline rank; empty: the same for all. A rank of speed 0.5 takes twice as long for each
  /// operator as `device` says; its messages take as long.
  std::vector<double> rank_speed;

  double speed_of(int rank) const { return rank_speed.empty() ? 1 : rank_speed[static_cast<size_t>(rank)]; }
};

/// How the runtime behaves.
struct RuntimeBehaviour {
  double optimizer_state_factor = 0;      // state in units of the parameters: 0 SGD, 1 momentum, 2 Adam
  double optimizer_workspace_factor = 0;  // of its step, in units of the parameter being updated
  int64_t gradient_bucket_bytes = 0;      // averaged over replicas at once; 0: there are no replicas
  bool gradients_overlap = true;          // buckets leave during the last backward; false: at the end
  bool gradients_share_memory = false;    // a bucket lies in a block that stays, where other replicas read it
  int num_gradient_blocks = 1;            // then: one for each model
  bool weight_gradients_wait = false;     // behind the gradients that leave; else a backward makes all of them at once
  bool repeats_a_microbatch = false;      // in one step the last one runs twice, from its inputs on (rank_memory.h)
};

/// What lies where: what the user has placed, and where tensors are already.
struct GivenPlacement {
  /// Module path or parameter name ("encoder.layers.3") -> rank; the longest matching prefix wins, "" matches all.
  std::map<std::string, int> pins;
  bool auto_partition = true;
  int default_partition = 0;  // of parameters without a pin, when auto_partition is false
  /// Every module path of the model, beyond those that the graph shows; a pin to one of them is no mistake.
  std::vector<std::string> known_modules;
  /// If not empty, operators follow their parameters and nothing is balanced; names that are missing are placed by `pins`.
  TensorHomes homes;
  /// Parameter name -> the rank of its home that adds up its gradient in other programs: where a plan
  /// with exact ties has its first reader, since microbatches of one step may run several programs.
  std::map<std::string, int> adders;

  /// Whether the planner decides alone.
  bool is_free() const { return auto_partition && homes.empty() && pins.empty(); }
};

/// All that planning takes beside a graph.
struct PartitionOptions {
  PlanRequest request;
  Machine machine;
  RuntimeBehaviour behaviour;
  GivenPlacement placement;
};

}  // namespace smp::partitioner
