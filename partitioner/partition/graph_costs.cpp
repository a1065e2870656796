// Per node from the cost models; per cut from the lifetimes of values.
#include "partitioner/partition/graph_costs.h"

#include <algorithm>

#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/operator_cost.h"
#include "partitioner/cost/remade_nodes.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/graph/gradient_flow.h"

namespace smp::partitioner {

namespace {

void put_measured(const Graph& graph, const MeasuredCosts& measured, GraphCosts& costs) {
  double measured_us = 0, predicted_us = 0;
  std::vector<size_t> unknown;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const OperatorTime* time = measured.find(graph, graph.nodes[n]);
    if (time == nullptr) {
      unknown.push_back(n);
      continue;
    }
    predicted_us += costs.forward_us[n] + costs.backward_us[n];
    measured_us += time->forward_us + time->backward_us;
    costs.forward_us[n] = time->forward_us;
    costs.backward_us[n] = time->backward_us;
  }
  const double correction = predicted_us > 0 && measured_us > 0 ? measured_us / predicted_us : 1;
  for (const size_t n : unknown) {
    costs.forward_us[n] *= correction;
    costs.backward_us[n] *= correction;
  }
}

void add_up(GraphCosts& costs) {
  costs.total_us = costs.heaviest_us = 0;
  for (size_t n = 0; n < costs.forward_us.size(); ++n) {
    const double node_us = costs.forward_us[n] + costs.backward_us[n];
    costs.total_us += node_us;
    costs.heaviest_us = std::max(costs.heaviest_us, node_us);
  }
}

}  // namespace

GraphCosts graph_costs(const Graph& graph, const DeviceModel& device, const MeasuredCosts* measured) {
  GraphCosts costs;
  costs.activation_bytes = activation_bytes(graph);
  for (const Node& node : graph.nodes) {
    const OperatorCost cost = operator_cost(graph, node, graph.has_backward());
    costs.forward_us.push_back(device.forward_us(cost.forward));
    costs.backward_us.push_back(device.backward_us(cost.backward));
  }
  if (measured != nullptr) put_measured(graph, *measured, costs);
  costs.again_us.assign(graph.nodes.size(), 0);
  add_up(costs);
  return costs;
}

GraphCosts with_recomputation(const Graph& graph, GraphCosts costs, const Recomputation& recomputation) {
  if (recomputation.is_empty()) return costs;
  const auto remade = remade_nodes(graph, GradientFlow(graph), recomputation.region, recomputation.is_kept);
  for (size_t n = 0; n < remade.size(); ++n) {
    if (recomputation.region[n] != kNoRegion && !recomputation.is_kept[n]) costs.activation_bytes[n] = 0;
    costs.backward_us[n] -= costs.again_us[n];
    costs.again_us[n] = remade[n] ? costs.forward_us[n] : 0;
    costs.backward_us[n] += costs.again_us[n];
  }
  add_up(costs);
  return costs;
}

int64_t message_bytes(const Value& value) { return extent_bytes(value.spec); }

std::vector<double> cut_traffic_us(const Graph& graph, const DeviceModel& device, const std::vector<NodeId>& order) {
  std::vector<size_t> position(order.size());
  for (size_t p = 0; p < order.size(); ++p) position[order[p]] = p;
  std::vector<size_t> last(graph.values.size(), 0);  // position of the last reader
  for (size_t p = 0; p < order.size(); ++p) {
    for (ValueId id : node_inputs(graph.nodes[order[p]])) last[id] = p;
  }
  // A value crosses the positions (producer, last reader]: added at the first, taken away behind the last.
  std::vector<double> change_us(graph.nodes.size() + 2, 0);
  std::vector<int> crossing(graph.nodes.size() + 2, 0);
  const GradientFlow gradients(graph);
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const Value& value = graph.values[v];
    if (value.kind != ValueKind::kResult) continue;
    const size_t made = position[value.producer];
    if (last[v] <= made) continue;
    const bool returns = gradients.receives_gradient(static_cast<ValueId>(v));
    const double us = device.message_us(message_bytes(value)) * (returns ? 2 : 1);
    if (us == 0) continue;
    change_us[made + 1] += us;
    change_us[last[v] + 1] -= us;
    ++crossing[made + 1];
    --crossing[last[v] + 1];
  }
  std::vector<double> traffic_us(graph.nodes.size() + 1, 0);
  double us = 0;
  int num_crossing = 0;
  for (size_t p = 0; p < traffic_us.size(); ++p) {
    us += change_us[p];
    num_crossing += crossing[p];
    if (num_crossing == 0) us = 0;  // no rounding error may look like traffic
    traffic_us[p] = us;
  }
  return traffic_us;
}

}  // namespace smp::partitioner
