// Operators that a backward passes, by the parameters that they read.
#include "partitioner/plan/trained_on.h"

#include <set>

#include "partitioner/graph/gradient_flow.h"

namespace smp::partitioner {

std::map<std::string, std::vector<int>> trained_on(const Graph& graph, const Plan& plan) {
  if (!graph.has_backward()) return {};
  const GradientFlow flow(graph);
  std::map<std::string, std::set<int>> ranks;
  for (const StagePlan& stage : plan.stages) {
    for (const NodeId node : stage.nodes) {
      if (!flow.passes_gradient(node)) continue;
      for (const ValueId id : node_inputs(graph.nodes[node])) {
        const Value& value = graph.values[id];
        if (value.kind == ValueKind::kParameter && value.spec.requires_grad) ranks[value.name].insert(stage.rank);
      }
    }
  }
  std::map<std::string, std::vector<int>> trained;
  for (const auto& [name, on] : ranks) trained[name].assign(on.begin(), on.end());
  return trained;
}

}  // namespace smp::partitioner
