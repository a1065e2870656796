// Readers of every value by stage, forward and backward.
#include "partitioner/plan/derive.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

#include "partitioner/graph/gradient_flow.h"

namespace smp::partitioner {
namespace {

void check_assignment(const Graph& graph, const Plan& plan) {
  TORCH_CHECK_VALUE(plan.stage_of_node.size() == graph.nodes.size(), "plan: expected a stage for each of ",
                    graph.nodes.size(), " nodes, got ", plan.stage_of_node.size(), ".", kPlanAgain);
  const int num_stages = static_cast<int>(plan.stages.size());
  std::vector<bool> has_operator(plan.stages.size(), false);
  for (const int stage : plan.stage_of_node) {
    TORCH_CHECK_VALUE(stage >= 0 && stage < num_stages, "plan: expected operators on stages 0 to ", num_stages - 1, ", got ",
                      stage, ".", kPlanAgain);
    has_operator[stage] = true;
  }
  for (int stage = 0; stage < num_stages; ++stage) {
    const int rank = plan.stages[stage].rank;
    TORCH_CHECK_VALUE(rank >= 0 && rank < plan.num_ranks, "plan: expected stage ", stage, " on a rank from 0 to ",
                      plan.num_ranks - 1, ", got ", rank, ".", kPlanAgain);
    TORCH_CHECK_VALUE(has_operator[stage], "plan: expected operators on stage ", stage, ", got none.", kPlanAgain);
  }
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

void add_nodes(const Graph& graph, Plan& plan) {
  for (StagePlan& stage : plan.stages) stage.nodes.clear(), stage.parameters.clear(), stage.modules.clear();
  std::vector<std::set<ValueId>> seen(plan.stages.size());
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    StagePlan& stage = plan.stages[plan.stage_of_node[n]];
    stage.nodes.push_back(static_cast<NodeId>(n));
    add_once(stage.modules, node.module);
    for (ValueId id : node_inputs(node)) {
      const Value& value = graph.values[id];
      if (!is_named(value) || !seen[plan.stage_of_node[n]].insert(id).second) continue;
      stage.parameters.push_back(id);
      if (node.module.empty()) add_once(stage.modules, owner_of(value.name));
    }
  }
}

/// By ValueId: the stages whose nodes read it, ascending; only nodes that backward passes through, if asked.
std::vector<std::vector<int>> reading_stages(const Graph& graph, const std::vector<int>& stage_of_node,
                                             const GradientFlow* only_with_gradient) {
  std::vector<std::vector<int>> stages(graph.values.size());
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (only_with_gradient && !only_with_gradient->passes_gradient(static_cast<NodeId>(n))) continue;
    for (ValueId id : node_inputs(graph.nodes[n])) {
      auto& of_value = stages[id];
      if (of_value.empty() || of_value.back() != stage_of_node[n]) {
        of_value.push_back(stage_of_node[n]);
      }
    }
  }
  for (auto& of_value : stages) {
    std::sort(of_value.begin(), of_value.end());
    of_value.erase(std::unique(of_value.begin(), of_value.end()), of_value.end());
  }
  return stages;
}

std::vector<Transfer> activation_transfers(const Graph& graph, const std::vector<int>& stage_of_node) {
  std::vector<Transfer> transfers;
  const auto readers = reading_stages(graph, stage_of_node, nullptr);
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const Value& value = graph.values[v];
    const bool is_input = value.kind == ValueKind::kInput;
    if (!is_input && value.kind != ValueKind::kResult) continue;
    const int source = is_input ? kInputStage : stage_of_node[value.producer];
    for (int target : readers[v]) {
      if (target != source) transfers.push_back({static_cast<ValueId>(v), source, target});
    }
  }
  return transfers;
}

/// From the last reader down to the producer.
void add_value_relays(ValueId id, const std::vector<int>& readers, int producer, int backward,
                      std::vector<Transfer>& relays) {
  int source = -1;
  for (auto stage = readers.rbegin(); stage != readers.rend(); ++stage) {
    if (source >= 0) relays.push_back({id, source, *stage, backward});
    source = *stage;
  }
  if (source > producer) relays.push_back({id, source, producer, backward});
}

/// Between the stages of one rank, or of all with exact ties. Readers in another backward count:
/// they all see one leaf, which lives on the first of them.
void add_parameter_relays(ValueId id, const std::vector<int>& readers, const Plan& plan, int backward,
                          std::vector<Transfer>& relays) {
  for (size_t i = readers.size(); i-- > 0;) {
    const int rank = plan.stages[readers[i]].rank;
    for (size_t before = i; before-- > 0;) {
      if (!plan.exact_ties && plan.stages[readers[before]].rank != rank) continue;
      relays.push_back({id, readers[i], readers[before], backward});
      break;
    }
  }
}

std::vector<Transfer> gradient_relays(const Graph& graph, const Plan& plan) {
  const std::vector<int>& stage_of_node = plan.stage_of_node;
  std::vector<Transfer> relays;
  const GradientFlow any(graph);
  const auto readers_in_any = reading_stages(graph, stage_of_node, &any);
  for (size_t k = 0; k < graph.backward_roots.size(); ++k) {
    const GradientFlow gradients(graph, {graph.backward_roots[k]});
    const auto readers = reading_stages(graph, stage_of_node, &gradients);
    for (size_t v = 0; v < graph.values.size(); ++v) {
      const auto id = static_cast<ValueId>(v);
      const Value& value = graph.values[v];
      if (value.kind == ValueKind::kParameter && value.spec.requires_grad) {
        add_parameter_relays(id, readers_in_any[v], plan, static_cast<int>(k), relays);
      }
      if (value.kind != ValueKind::kResult || !gradients.receives_gradient(id)) continue;
      add_value_relays(id, readers[v], stage_of_node[value.producer], static_cast<int>(k), relays);
    }
  }
  return relays;
}

}  // namespace

void derive(const Graph& graph, Plan& plan) {
  check_assignment(graph, plan);
  add_nodes(graph, plan);
  plan.activations = activation_transfers(graph, plan.stage_of_node);
  plan.gradients = gradient_relays(graph, plan);
}

}  // namespace smp::partitioner
