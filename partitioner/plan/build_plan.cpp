// Stages, transfers, costs and memory of a given assignment.
#include "partitioner/plan/build_plan.h"

#include <algorithm>
#include <set>
#include <string>

#include "partitioner/cost/memory_model.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/plan/crossings.h"
#include "partitioner/schedule/generate.h"

namespace smp::partitioner {
namespace {

bool is_named(const Value& value) {
  return value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer;
}

void add_once(std::vector<std::string>& names, const std::string& name) {
  if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) {
    names.push_back(name);
  }
}

/// "encoder.0" for "encoder.0.weight"; empty for a parameter of the root module.
std::string owner_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "" : parameter.substr(0, dot);
}

void add_nodes(const Graph& graph, const std::vector<int>& stage_of_node, Plan& plan) {
  std::vector<std::set<ValueId>> seen(plan.stages.size());
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    StagePlan& stage = plan.stages[stage_of_node[n]];
    stage.nodes.push_back(static_cast<NodeId>(n));
    add_once(stage.modules, node.module);
    for (ValueId id : node_inputs(node)) {
      const Value& value = graph.values[id];
      if (!is_named(value) || !seen[stage_of_node[n]].insert(id).second) continue;
      stage.parameters.push_back(id);
      if (node.module.empty()) add_once(stage.modules, owner_of(value.name));
    }
  }
}

/// Bytes that one microbatch in flight keeps on `stage`; a storage counts once, also one that was
/// received.
int64_t stage_activation_bytes(const Graph& graph, const StagePlan& stage,
                               const std::vector<int64_t>& storage_extents) {
  if (!graph.has_backward()) return 0;
  std::set<int32_t> counted;
  int64_t bytes = 0;
  for (NodeId n : stage.nodes) {
    bytes += extra_saved_bytes(graph, graph.nodes[n]);
    for (int32_t storage : saved_storages(graph, graph.nodes[n])) {
      if (counted.insert(storage).second) bytes += storage_extents[storage];
    }
  }
  return bytes;
}

void add_stage_costs(const Graph& graph, const GraphCosts& costs, const PartitionOptions& options,
                     Plan& plan) {
  const std::vector<int64_t> extents = storage_bytes(graph);
  for (StagePlan& stage : plan.stages) {
    for (NodeId n : stage.nodes) {
      stage.cost.forward_us += costs.forward_us[n];
      stage.cost.backward_us += costs.backward_us[n];
    }
    for (ValueId id : stage.parameters) {
      const ParameterBytes bytes =
          parameter_bytes(graph.values[id], options.optimizer_state_factor);
      stage.cost.parameter_bytes += bytes.parameter;
      stage.cost.gradient_bytes += bytes.gradient;
      stage.cost.optimizer_bytes += bytes.optimizer;
    }
    stage.cost.activation_bytes = stage_activation_bytes(graph, stage, extents);
  }
}

/// Both ends of a message pay for it; within one rank nothing is sent.
void add_message_costs(const Graph& graph, const DeviceModel& device, Plan& plan) {
  const auto pay = [&](const Transfer& transfer) {
    const int source_rank = transfer.source == kInputStage ? 0 : plan.stages[transfer.source].rank;
    if (source_rank == plan.stages[transfer.target].rank) return;
    const double us = device.message_us(message_bytes(graph.values[transfer.value]));
    plan.stages[transfer.target].cost.send_us += us;
    if (transfer.source != kInputStage) plan.stages[transfer.source].cost.send_us += us;
  };
  for (const Transfer& transfer : plan.activations) pay(transfer);
  for (const Transfer& relay : plan.gradients) pay(relay);
}

std::vector<int64_t> peak_bytes(const Graph& graph, const PartitionOptions& options,
                                const Plan& plan) {
  const std::vector<int> in_flight =
      in_flight_by_stage(options, static_cast<int>(plan.stages.size()));
  std::vector<int64_t> peak(options.num_ranks, 0);
  std::vector<std::set<ValueId>> held(options.num_ranks);  // two visits hold a parameter once
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    const StagePlan& stage = plan.stages[s];
    peak[stage.rank] += in_flight[s] * stage.cost.activation_bytes;
    for (ValueId id : stage.parameters) {
      if (held[stage.rank].insert(id).second) {
        peak[stage.rank] +=
            parameter_bytes(graph.values[id], options.optimizer_state_factor).total();
      }
    }
  }
  return peak;
}

double slowest_rank_us(const Plan& plan) {
  std::vector<double> rank_us(plan.num_ranks, 0);
  for (const StagePlan& stage : plan.stages) {
    rank_us[stage.rank] += stage.cost.forward_us + stage.cost.backward_us + stage.cost.send_us;
  }
  return *std::max_element(rank_us.begin(), rank_us.end());
}

}  // namespace

std::vector<int> in_flight_by_stage(const PartitionOptions& options, int num_stages) {
  std::vector<int> limits = in_flight_limits(options.schedule, options.num_ranks, num_stages,
                                             options.num_microbatches, options.active_microbatches);
  for (int& limit : limits) limit = std::min(limit, options.num_microbatches);
  return limits;
}

Plan build_plan(const Graph& graph, const GraphCosts& costs, const StageAssignment& assignment,
                const PartitionOptions& options) {
  Plan plan;
  plan.num_ranks = options.num_ranks;
  plan.stage_of_node = assignment.stage_of_node;
  plan.stages.resize(assignment.rank_of_stage.size());
  for (size_t s = 0; s < plan.stages.size(); ++s) plan.stages[s].rank = assignment.rank_of_stage[s];
  add_nodes(graph, plan.stage_of_node, plan);
  plan.activations = activation_transfers(graph, plan.stage_of_node);
  plan.gradients = gradient_relays(graph, plan.stage_of_node);
  add_stage_costs(graph, costs, options, plan);
  add_message_costs(graph, options.device, plan);
  plan.lower_bound_us = std::max(costs.total_us / options.num_ranks, costs.heaviest_us);
  plan.slowest_stage_us = slowest_rank_us(plan);
  // Fill and drain of a chain; the simulator knows the schedule better.
  const auto rounds =
      static_cast<double>(options.num_microbatches + static_cast<int>(plan.stages.size()) - 1);
  plan.predicted_step_us = rounds * plan.slowest_stage_us;
  plan.predicted_peak_bytes = peak_bytes(graph, options, plan);
  return plan;
}

}  // namespace smp::partitioner
