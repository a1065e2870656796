// Checks that the graphs of one step fit together.
#include "partitioner/schedule/microbatch_graphs.h"

#include <c10/util/Exception.h>

namespace smp::partitioner {

MicrobatchGraphs::MicrobatchGraphs(std::span<const StageGraph* const> graph_of_microbatch)
    : graphs_(graph_of_microbatch.begin(), graph_of_microbatch.end()) {
  TORCH_CHECK_VALUE(!graphs_.empty(),
                    "schedule: expected at least one microbatch, got none. Set microbatches >= 1.");
  for (size_t m = 0; m < graphs_.size(); ++m) {
    const StageGraph* graph = graphs_[m];
    TORCH_CHECK_VALUE(graph != nullptr, "schedule: expected a stage graph for microbatch ", m,
                      ", got a null pointer.");
    auto found = owned_.find(graph);
    if (found == owned_.end()) {
      validate(*graph);
      TORCH_CHECK_VALUE(graph->num_ranks == graphs_[0]->num_ranks &&
                            graph->rank_of_stage == graphs_[0]->rank_of_stage,
                        "schedule: expected microbatch ", m,
                        " to have the stages and ranks of microbatch 0, got ", graph->num_stages(),
                        " stages on ", graph->num_ranks, " ranks instead of ",
                        graphs_[0]->num_stages(), " on ", graphs_[0]->num_ranks,
                        " or another placement. Run the same layers in all microbatches of a step.");
      found = owned_.emplace(graph, Neighbours(*graph)).first;
    }
    neighbours_.push_back(&found->second);
  }
}

}  // namespace smp::partitioner
