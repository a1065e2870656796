// A graph as a chain of operators that can be split: what each costs and holds, in one order.
#pragma once

#include <cstdint>
#include <vector>

#include "partitioner/graph/graph.h"
#include "partitioner/plan/build_plan.h"
#include "partitioner/plan/contiguous.h"
#include "partitioner/plan/graph_costs.h"
#include "partitioner/plan/linearise.h"
#include "partitioner/plan/partition.h"

namespace smp::partitioner {

/// What the chain split needs of one order of the operators.
struct Layout {
  const Linearisation& order;
  std::vector<double> traffic_us;  // by position
};

/// By position: bytes of the parameters that are read there first, never more than what a stage
/// with that node holds at its peak. A shared parameter counts at its first reader only. Where all
/// microbatches are in flight at once no gradient is there yet when most activations are.
std::vector<int64_t> least_bytes(const Graph& graph, const std::vector<NodeId>& order,
                                 const PartitionOptions& options);

/// For the stages of `options`, with their limits and speeds; memory as it usually is.
Chain make_chain(const Graph& graph, const GraphCosts& costs, const Layout& layout,
                 const PartitionOptions& options);

/// Stage s on rank s % num_ranks.
StageAssignment assign_stages(const ChainSplit& split, const std::vector<NodeId>& order, int num_ranks);

/// By how many bytes the rank that is furthest over its limit is; 0 when none is.
int64_t largest_excess(const Plan& plan, const PartitionOptions& options);

}  // namespace smp::partitioner
