// Edges of a stage graph by stage. Internal to the schedule room.
#pragma once

#include <vector>

#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

/// The stages on the other end of each stage's edges, ascending. Step inputs appear as source kInputStage.
struct Neighbours {
  explicit Neighbours(const StageGraph& graph);

  std::vector<std::vector<int>> activation_sources;  // by target stage
  std::vector<std::vector<int>> activation_targets;  // by source stage, without the step inputs
  std::vector<std::vector<int>> gradient_sources;    // by target stage
  std::vector<std::vector<int>> gradient_targets;    // by source stage
};

}  // namespace smp::partitioner
