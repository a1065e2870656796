// Which ranks may run an operator: pins of modules, the default rank, and parameters that are placed already.
#pragma once

#include <vector>

#include "partitioner/graph/graph.h"
#include "partitioner/plan/options.h"

namespace smp::partitioner {

/// Ranks that may run something. Empty: all.
using RankSet = std::vector<int>;  // sorted, unique

/// Throws c10::ValueError for ranks out of range, and for pins to modules that do not exist: did you mean?
void check_pins(const Graph& graph, const GivenPlacement& placement, int num_ranks);

/// By block of nodes that no cut separates (`starts`: position in `order` of the first node of each
/// block): ranks that hold all of the parameters and buffers that the block reads; for the first that trains a
/// parameter with a home, that rank. Throws c10::ValueError, naming two of them, when there is none.
std::vector<RankSet> allowed_ranks(const Graph& graph, const std::vector<NodeId>& order, const std::vector<int>& starts,
                                   const GivenPlacement& placement);

}  // namespace smp::partitioner
