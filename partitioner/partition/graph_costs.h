// The costs of a whole graph in the form that partitioning needs: per node, and per position of a cut.
#pragma once

#include <cstdint>
#include <vector>

#include "partitioner/cost/device_model.h"
#include "partitioner/cost/measured_costs.h"
#include "partitioner/graph/graph.h"
#include "partitioner/graph/recomputation.h"

namespace smp::partitioner {

/// One microbatch, by NodeId.
struct GraphCosts {
  std::vector<double> forward_us;
  std::vector<double> backward_us;
  std::vector<double> again_us;           // of backward_us: the forward that runs again
  std::vector<int64_t> activation_bytes;  // memory_model.h
  double total_us = 0;
  double heaviest_us = 0;  // node
};

/// `measured`, if any, takes the place of what `device` predicts. Operators that it does not know are predicted, and
/// corrected by as much as the prediction of the known ones was wrong.
GraphCosts graph_costs(const Graph& graph, const DeviceModel& device, const MeasuredCosts* measured = nullptr);

/// The costs of plans with `recomputation`.
GraphCosts with_recomputation(const Graph& graph, GraphCosts costs, const Recomputation& recomputation);

/// Bytes of the message that carries `value`: an expanded dimension is sent once.
int64_t message_bytes(const Value& value);

/// By position, num_nodes + 1 entries: microseconds that either side of a cut there spends on the
/// values that cross it and on their gradients, where the nodes stand in `order`.
std::vector<double> cut_traffic_us(const Graph& graph, const DeviceModel& device, const std::vector<NodeId>& order);

}  // namespace smp::partitioner
