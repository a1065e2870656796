// What of the recompute regions of a body can run again by itself.
#pragma once

#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

inline constexpr int32_t kKept = -1;

/// By NodeId: the region that the operator is recomputed with, or kKept. Those with which it must stay together (node_groups)
/// may reach out of its region; then all between them are kept. Without backwards all are.
std::vector<int32_t> recomputed_with(const Graph& graph);

}  // namespace smp::partitioner
