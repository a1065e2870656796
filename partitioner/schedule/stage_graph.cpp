// Condenses a plan to stages and edges, and finds the stages that have a backward.
#include "partitioner/schedule/stage_graph.h"

#include <c10/util/Exception.h>

#include <set>

#include "partitioner/graph/gradient_flow.h"

namespace smp::partitioner {
namespace {

std::vector<Edge> unique_edges(const std::vector<Transfer>& transfers) {
  std::set<Edge> edges;
  for (const Transfer& transfer : transfers) edges.insert({transfer.source, transfer.target});
  return {edges.begin(), edges.end()};
}

std::vector<bool> stages_with_backward(const Plan& plan, const Graph& graph) {
  std::vector<bool> has_backward(plan.stages.size(), false);
  if (!graph.has_backward()) return has_backward;
  const GradientFlow gradients(graph);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (gradients.passes_gradient(static_cast<NodeId>(n))) {
      has_backward[plan.stage_of_node[n]] = true;
    }
  }
  for (const Transfer& relay : plan.gradients) {
    has_backward[relay.source] = true;
    has_backward[relay.target] = true;
  }
  return has_backward;
}

void validate_edges(const StageGraph& graph, const std::vector<Edge>& edges, bool is_activation) {
  const char* name = is_activation ? "activations" : "gradients";
  const Edge* previous = nullptr;
  for (const Edge& edge : edges) {
    const bool in_range = edge.source < graph.num_stages() && edge.target < graph.num_stages() &&
                          edge.source >= (is_activation ? kInputStage : 0) && edge.target >= 0;
    const bool is_downhill = is_activation ? edge.source < edge.target : edge.source > edge.target;
    TORCH_CHECK_VALUE(in_range && is_downhill, "stage graph: expected every edge of `", name, "` to lead to a ",
                      is_activation ? "later" : "earlier", " one of ", graph.num_stages(), " stages, got ", edge.source,
                      " -> ", edge.target, ". Number the stages in program order.");
    TORCH_CHECK_VALUE(previous == nullptr || *previous < edge, "stage graph: expected `", name, "` sorted and unique, got ",
                      edge.source, " -> ", edge.target, " after ", previous == nullptr ? 0 : previous->source, " -> ",
                      previous == nullptr ? 0 : previous->target, ". Sort them.");
    TORCH_CHECK_VALUE(is_activation || (graph.stage_has_backward[edge.source] && graph.stage_has_backward[edge.target]),
                      "stage graph: expected both ends of the gradient edge ", edge.source, " -> ", edge.target,
                      " to have a backward. Mark them in `stage_has_backward`.");
    previous = &edge;
  }
}

}  // namespace

StageGraph stage_graph(const Plan& plan, const Graph& graph) {
  const int num_stages = static_cast<int>(plan.stages.size());
  TORCH_CHECK_VALUE(plan.stage_of_node.size() == graph.nodes.size(), "stage graph: expected a plan of this graph's ",
                    graph.nodes.size(), " nodes, got one of ", plan.stage_of_node.size(), ". Plan this graph first.");
  for (int stage : plan.stage_of_node) {
    TORCH_CHECK_VALUE(stage >= 0 && stage < num_stages, "stage graph: expected stages 0 to ", num_stages - 1,
                      " in stage_of_node, got ", stage, ". Assign every node to one of the plan's stages.");
  }
  StageGraph result;
  result.num_ranks = plan.num_ranks;
  for (const StagePlan& stage : plan.stages) result.rank_of_stage.push_back(stage.rank);
  result.activations = unique_edges(plan.activations);
  if (graph.has_backward()) result.gradients = unique_edges(plan.gradients);
  // Edges first without marks: the marks index stages by edge.
  result.stage_has_backward.assign(num_stages, true);
  validate(result);
  result.stage_has_backward = stages_with_backward(plan, graph);
  return result;
}

void validate(const StageGraph& graph) {
  TORCH_CHECK_VALUE(graph.num_ranks >= 1, "stage graph: expected at least one rank, got ", graph.num_ranks,
                    ". Set num_ranks.");
  for (int stage = 0; stage < graph.num_stages(); ++stage) {
    const int rank = graph.rank_of_stage[stage];
    TORCH_CHECK_VALUE(rank >= 0 && rank < graph.num_ranks, "stage graph: expected stage ", stage, " on a rank from 0 to ",
                      graph.num_ranks - 1, ", got ", rank, ". Place it on one of the pipeline's ranks.");
  }
  TORCH_CHECK_VALUE(graph.stage_has_backward.size() == graph.rank_of_stage.size(),
                    "stage graph: expected one entry of stage_has_backward for each of ", graph.num_stages(),
                    " stages, got ", graph.stage_has_backward.size(), ".");
  validate_edges(graph, graph.activations, true);
  validate_edges(graph, graph.gradients, false);
}

}  // namespace smp::partitioner
