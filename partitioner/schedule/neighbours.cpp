// Sorts edges by stage.
#include "partitioner/schedule/neighbours.h"

namespace smp::partitioner {

Neighbours::Neighbours(const StageGraph& graph)
    : activation_sources(graph.num_stages()),
      activation_targets(graph.num_stages()),
      gradient_sources(graph.num_stages()),
      gradient_targets(graph.num_stages()) {
  for (const Edge& edge : graph.activations) {
    activation_sources[edge.target].push_back(edge.source);
    if (edge.source != kInputStage) activation_targets[edge.source].push_back(edge.target);
  }
  for (const Edge& edge : graph.gradients) {
    gradient_sources[edge.target].push_back(edge.source);
    gradient_targets[edge.source].push_back(edge.target);
  }
}

}  // namespace smp::partitioner
