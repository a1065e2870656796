// A graph as a chain of operators that can be split: what each costs and holds, in one order.
#pragma once

#include <cstdint>
#include <vector>

#include "partitioner/graph/graph.h"
#include "partitioner/partition/build_plan.h"
#include "partitioner/partition/contiguous.h"
#include "partitioner/plan/linearise.h"
#include "partitioner/plan/options.h"

namespace smp::partitioner {

/// What is sent of the values of `graph`, step inputs and gradients included, where its nodes stand in `order`: operators
/// are positions in it. A step input counts as made by the first operator, since the rank of the first stage holds it.
std::vector<Crossing> crossings(const Graph& graph, const DeviceModel& device, const std::vector<NodeId>& order);

/// By position: bytes of the parameters that are read there first, never more than what a stage
/// with that node holds at its peak. A shared parameter counts at its first reader only. Where all
/// microbatches are in flight at once no gradient is there yet when most activations are.
std::vector<int64_t> least_bytes(const PlanInput& input, const std::vector<NodeId>& order);

/// For the stages that are asked for, with their limits and speeds; memory as it usually is.
Chain make_chain(const PlanInput& input, const Linearisation& order);

/// Stage s on rank s % num_ranks.
StageAssignment assign_stages(const ChainSplit& split, const std::vector<NodeId>& order, int num_ranks);

/// By how many bytes the rank that is furthest over its limit is; 0 when none is.
int64_t largest_excess(const Plan& plan, const PlanRequest& request);

}  // namespace smp::partitioner
