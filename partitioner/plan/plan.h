// What planning decides: which rank runs which operators, and what crosses between them. Plain data.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "partitioner/graph/graph.h"
#include "partitioner/graph/recomputation.h"
#include "partitioner/plan/action.h"
#include "partitioner/plan/schedule_options.h"

namespace smp::partitioner {

/// Predicted cost of one stage for one microbatch, and of what it keeps in memory.
struct StageCost {
  double forward_us = 0;
  double backward_us = 0;
  double again_us = 0;   // of backward_us: operators that run again
  double weight_us = 0;  // of backward_us: gradients of parameters, behind those that leave the stage
  double send_us = 0;    // its part of the traffic on its cuts, both directions
  int64_t parameter_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t activation_bytes = 0;  // saved for backward, per microbatch in flight
  int64_t workspace_bytes = 0;   // at most beyond these while its operators run forward or backward
  int64_t message_bytes = 0;     // buffers of messages on their way: all of its rank, on the first
  bool operator==(const StageCost&) const = default;
};

/// The fields of StageCost by name, as text forms have them.
inline constexpr std::pair<const char*, double StageCost::*> kStageTimes[] = {{"forward_us", &StageCost::forward_us},
                                                                              {"backward_us", &StageCost::backward_us},
                                                                              {"again_us", &StageCost::again_us},
                                                                              {"weight_us", &StageCost::weight_us},
                                                                              {"send_us", &StageCost::send_us}};
inline constexpr std::pair<const char*, int64_t StageCost::*> kStageBytes[] = {
    {"parameter_bytes", &StageCost::parameter_bytes}, {"gradient_bytes", &StageCost::gradient_bytes},
    {"optimizer_bytes", &StageCost::optimizer_bytes}, {"activation_bytes", &StageCost::activation_bytes},
    {"workspace_bytes", &StageCost::workspace_bytes}, {"message_bytes", &StageCost::message_bytes}};

/// One visit of a rank: a run of operators executed together. Automatic partitioning gives one per rank.
struct StagePlan {
  int rank = 0;                      // pipeline rank that executes it
  std::vector<NodeId> nodes;         // program order
  std::vector<ValueId> parameters;   // parameters and buffers read here
  std::vector<std::string> modules;  // for reports
  StageCost cost;
  bool operator==(const StagePlan&) const = default;
};

/// A value that crosses between stages: forward from its producer to one consumer, or its gradient in one of the graph's
/// backwards. source == kInputStage: a step input, which the leader (pipeline rank 0) holds.
struct Transfer {
  ValueId value = kNoValue;
  int source = 0;    // stage index
  int target = 0;    // stage index
  int backward = 0;  // of gradients: which of the graph's backwards; 0 for activations
  bool operator==(const Transfer&) const = default;
};
/// Everything a rank needs to execute a graph.
///
/// `gradients` are the relays (docs/architecture.md, what makes results equal): the last consumer of a value sends its
/// gradient to the consumer before it, and so on down to the producer, so that the additions
/// associate as on one rank. A parameter that several stages of one rank read is relayed between
/// these in the same way; the earliest of them adds the sum to its gradient. With exact ties, one
/// that several ranks read too: its first reader's rank adds up the gradient of each microbatch.
struct Plan {
  int num_ranks = 1;
  ScheduleOptions schedule;  // of the table that the predictions are of, and that runs
  /// A table that no generator makes: by rank, the computations from first to last, each weight gradient anywhere behind its
  /// backward. For steps of this program alone with as many microbatches; others have that of `schedule`. Empty: none.
  std::vector<std::vector<Action>> table;
  bool exact_ties = false;         // else each rank adds up its own readers' part, exact to 1e-6
  std::vector<StagePlan> stages;   // each reads what earlier ones make
  std::vector<int> stage_of_node;  // by NodeId
  Recomputation recomputation;
  std::vector<Transfer> activations;  // forward, ordered by (value, target)
  std::vector<Transfer> gradients;    // ordered by (backward, value, descending source)
  double predicted_step_us = 0;       // bodies, the schedule by simulation, and the averaging over replicas
  double predicted_bubble = 0;  // the part of the schedule, on mean times, in which a rank does not compute, mean over ranks
  double lower_bound_us = 0;    // slowest possible stage: max(total / ranks, heaviest operator), per microbatch
  double slowest_stage_us = 0;  // of this plan, per microbatch
  std::vector<int64_t> predicted_peak_bytes;  // by pipeline rank
  /// The pipeline rank that holds a stage; the step inputs (kInputStage) lie on rank 0.
  int rank_of(int stage) const { return stage == kInputStage ? 0 : stages[static_cast<size_t>(stage)].rank; }
  bool operator==(const Plan&) const = default;
};

/// One stage of a plan cut into segments, which its rank runs one after the other. In `plan` they are the stages [first,
/// first + is_taped.size()); all others are those of before. It says what crosses between them, not what they cost.
struct Segments {
  Plan plan;
  int first = 0;
  std::vector<bool> is_taped;        // false: stays on autograd
  std::vector<bool> is_recomputed;   // keeps its inputs alone, and runs forward again before its backward
  std::vector<std::string> reasons;  // why operators of these are not taped, each once
};

}  // namespace smp::partitioner
