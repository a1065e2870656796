// The skeleton of a plan that a schedule needs: which stage waits for which, and where each runs.
#pragma once

#include <vector>

#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// All values that move from one stage to another for one microbatch. source == kInputStage: step inputs.
struct Edge {
  int source = 0;
  int target = 0;
  auto operator<=>(const Edge&) const = default;
};

/// Stages of one graph in program order, and the dependencies between them.
///
/// Edges within one rank, and from kInputStage to rank 0, are local: nothing is sent, the order still holds.
struct StageGraph {
  int num_ranks = 1;
  std::vector<int> rank_of_stage;
  std::vector<Edge> activations;         // sorted, unique; source < target
  std::vector<Edge> gradients;           // sorted, unique; source > target: backward of source before that of target
  std::vector<bool> stage_has_backward;  // false: nothing on that stage leads to the backward root

  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }
  /// The pipeline rank that holds a stage; the step inputs (kInputStage) lie on rank 0.
  int rank_of(int stage) const { return stage == kInputStage ? 0 : rank_of_stage[stage]; }
  bool is_local(const Edge& edge) const { return rank_of(edge.source) == rank_of(edge.target); }
  bool operator==(const StageGraph&) const = default;
};

/// Condenses `plan`, made for `graph`, into its stage graph. Throws c10::ValueError if they do not fit together.
StageGraph stage_graph(const Plan& plan, const Graph& graph);

/// Throws c10::ValueError unless ranks, edges and marks are in range, sorted, unique and acyclic.
void validate(const StageGraph& graph);

}  // namespace smp::partitioner
