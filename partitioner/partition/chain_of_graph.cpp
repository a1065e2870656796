// Costs and bytes by position.
#include "partitioner/partition/chain_of_graph.h"

#include <algorithm>
#include <utility>

#include "partitioner/cost/memory_model.h"
#include "partitioner/graph/gradient_flow.h"
#include "partitioner/schedule/generate.h"

namespace smp::partitioner {
namespace {

/// By position: bytes of the parameters that are read there first. One that is read again far away (a tied weight) counts
/// there again: its readers will hardly share a stage. The finished plan is checked exactly.
std::vector<int64_t> usual_bytes(const PlanInput& input, const std::vector<NodeId>& order) {
  std::vector<int64_t> bytes(order.size(), 0);
  std::vector<int64_t> last_reader(input.graph.values.size(), -1);
  const auto far = static_cast<int64_t>(order.size() / static_cast<size_t>(input.request.num_ranks));
  for (int64_t p = 0; p < std::ssize(order); ++p) {
    for (ValueId id : node_inputs(input.graph.nodes[order[p]])) {
      const Value& value = input.graph.values[id];
      if (!is_named(value)) continue;
      const bool is_counted = last_reader[id] >= 0 && p - last_reader[id] <= far;
      last_reader[id] = p;
      if (!is_counted) bytes[p] += parameter_bytes(value, input.behaviour.optimizer_state_factor).total();
    }
  }
  return bytes;
}

std::vector<int> in_flight_of(const PlanRequest& request) {
  return in_flight_limits(request.schedule, request.num_ranks, request.num_stages(), request.num_microbatches);
}

}  // namespace

std::vector<int64_t> least_bytes(const PlanInput& input, const std::vector<NodeId>& order) {
  const std::vector<int> in_flight = in_flight_of(input.request);
  const bool meets_gradients = *std::max_element(in_flight.begin(), in_flight.end()) < input.request.num_microbatches;
  std::vector<int64_t> bytes(order.size(), 0);
  std::vector<char> is_counted(input.graph.values.size(), 0);
  for (size_t p = 0; p < order.size(); ++p) {
    for (ValueId id : node_inputs(input.graph.nodes[order[p]])) {
      const Value& value = input.graph.values[id];
      if (!is_named(value) || std::exchange(is_counted[id], 1)) continue;
      const ParameterBytes of_value = parameter_bytes(value, input.behaviour.optimizer_state_factor);
      bytes[p] += of_value.total() - (meets_gradients ? 0 : of_value.gradient);
    }
  }
  return bytes;
}

std::vector<Crossing> crossings(const Graph& graph, const DeviceModel& device, const std::vector<NodeId>& order) {
  std::vector<int> position(order.size());
  for (int p = 0; p < std::ssize(order); ++p) position[order[p]] = p;
  std::vector<Crossing> all;
  const auto add = [&](const auto& is_sent, const auto& is_reader, bool is_relayed) {
    std::vector<std::vector<int>> readers(graph.values.size());
    for (int p = 0; p < std::ssize(order); ++p) {
      if (!is_reader(order[p])) continue;
      for (ValueId id : node_inputs(graph.nodes[order[p]])) {
        if (is_sent(id) && (readers[id].empty() || readers[id].back() != p)) readers[id].push_back(p);
      }
    }
    for (size_t v = 0; v < readers.size(); ++v) {
      if (readers[v].empty()) continue;
      const Value& value = graph.values[v];
      const int made_at = value.kind == ValueKind::kResult ? position[value.producer] : 0;
      all.push_back({made_at, std::move(readers[v]), device.message_us(message_bytes(value)), is_relayed});
    }
  };
  const auto kind_of = [&](ValueId id) { return graph.values[id].kind; };
  add([&](ValueId id) { return kind_of(id) == ValueKind::kResult || kind_of(id) == ValueKind::kInput; },
      [](NodeId) { return true; }, false);
  for (ValueId root : graph.backward_roots) {
    const GradientFlow flow(graph, {root});
    add([&](ValueId id) { return kind_of(id) == ValueKind::kResult && flow.receives_gradient(id); },
        [&](NodeId n) { return flow.passes_gradient(n); }, true);
  }
  return all;
}

Chain make_chain(const PlanInput& input, const Linearisation& order) {
  const auto& [graph, costs, request, machine, behaviour, recomputation] = input;
  Chain chain;
  for (NodeId n : order.nodes) {
    chain.time_us.push_back(costs.forward_us[n] + costs.backward_us[n]);
    chain.activation_bytes.push_back(costs.activation_bytes[n]);
  }
  chain.fixed_bytes = usual_bytes(input, order.nodes);
  chain.crossings = crossings(graph, machine.device, order.nodes);
  chain.cut_allowed = order.cut_allowed;
  const std::vector<int> in_flight = in_flight_of(request);
  for (size_t s = 0; s < in_flight.size(); ++s) {
    const int rank = static_cast<int>(s) % request.num_ranks;
    chain.stages.push_back({in_flight[s], request.limit_of(rank), 1 / machine.speed_of(rank)});
  }
  return chain;
}

StageAssignment assign_stages(const ChainSplit& split, const std::vector<NodeId>& order, int num_ranks) {
  StageAssignment assignment;
  assignment.stage_of_node.resize(order.size());
  for (int s = 0; s < split.num_used_stages; ++s) {
    assignment.rank_of_stage.push_back(s % num_ranks);
    for (int p = split.cuts[s]; p < split.cuts[s + 1]; ++p) assignment.stage_of_node[order[p]] = s;
  }
  return assignment;
}

int64_t largest_excess(const Plan& plan, const PlanRequest& request) {
  int64_t excess = 0;
  for (int rank = 0; rank < request.num_ranks; ++rank) {
    const int64_t limit = request.limit_of(rank);
    if (limit < 0) continue;
    excess = std::max(excess, plan.predicted_peak_bytes[static_cast<size_t>(rank)] - limit);
  }
  return excess;
}

}  // namespace smp::partitioner
