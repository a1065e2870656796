// Checks that the graphs of one step fit together, and numbers them.
#include "partitioner/schedule/microbatch_graphs.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace smp::partitioner {

Neighbours::Neighbours(int num_stages, const std::vector<Edge>& edges) : sources(num_stages), targets(num_stages) {
  for (const Edge& edge : edges) {
    sources[edge.target].push_back(edge.source);
    if (edge.source != kInputStage) targets[edge.source].push_back(edge.target);
  }
}

MicrobatchGraphs::MicrobatchGraphs(std::span<const StageGraph* const> graph_of_microbatch)
    : graphs_(graph_of_microbatch.begin(), graph_of_microbatch.end()) {
  TORCH_CHECK_VALUE(!graphs_.empty(), "schedule: expected at least one microbatch, got none. Set microbatches >= 1.");
  for (size_t m = 0; m < graphs_.size(); ++m) {
    const StageGraph* graph = graphs_[m];
    TORCH_CHECK_VALUE(graph != nullptr, "schedule: expected a stage graph for microbatch ", m, ", got a null pointer.");
    auto found = owned_.find(graph);
    if (found == owned_.end()) {
      validate(*graph);
      TORCH_CHECK_VALUE(graph->num_ranks == graphs_[0]->num_ranks, "schedule: expected microbatch ", m,
                        " to be planned for the ", graphs_[0]->num_ranks, " ranks of microbatch 0, got ", graph->num_ranks,
                        ". Plan all programs of a step for the same ranks.");
      const int num_stages = graph->num_stages();
      found =
          owned_.emplace(graph, Program{num_programs(), {num_stages, graph->activations}, {num_stages, graph->gradients}})
              .first;
    }
    programs_.push_back(&found->second);
  }
}

int MicrobatchGraphs::most_stages() const {
  int most = 0;
  for (const auto& [graph, program] : owned_) most = std::max(most, graph->num_stages());
  return most;
}

}  // namespace smp::partitioner
