// Operators that a backward passes, by the parameters that they read.
#include "partitioner/plan/trained_on.h"

#include <set>
#include <utility>

#include "partitioner/graph/gradient_flow.h"

namespace smp::partitioner {
namespace {

/// What hands its part of a gradient on to an earlier reader, which adds it up.
std::set<std::pair<int, ValueId>> relaying_stages(const Plan& plan) {
  std::set<std::pair<int, ValueId>> stages;
  for (const Transfer& relay : plan.gradients) stages.emplace(relay.source, relay.value);
  return stages;
}

}  // namespace

std::map<std::string, std::vector<int>> trained_on(const Graph& graph, const Plan& plan) {
  if (!graph.has_backward()) return {};
  const GradientFlow flow(graph);
  const auto relaying = relaying_stages(plan);
  std::map<std::string, std::set<int>> ranks;
  for (int s = 0; s < static_cast<int>(plan.stages.size()); ++s) {
    for (const NodeId node : plan.stages[s].nodes) {
      if (!flow.passes_gradient(node)) continue;
      for (const ValueId id : node_inputs(graph.nodes[node])) {
        const Value& value = graph.values[id];
        const bool is_trained =
            value.kind == ValueKind::kParameter && value.spec.requires_grad && !relaying.contains({s, id});
        if (is_trained) ranks[value.name].insert(plan.stages[s].rank);
      }
    }
  }
  std::map<std::string, std::vector<int>> trained;
  for (const auto& [name, on] : ranks) trained[name].assign(on.begin(), on.end());
  return trained;
}

}  // namespace smp::partitioner
