// A stage as runs of operators that are taped, or are not.
#include "partitioner/partition/segments.h"

#include <algorithm>

#include "partitioner/graph/cuts.h"
#include "partitioner/graph/untaped.h"
#include "partitioner/plan/derive.h"

namespace smp::partitioner {
namespace {

constexpr size_t kFewestOperators = 8;  // a segment under autograd starts its engine once more: 5 us

struct Run {
  std::vector<NodeId> nodes;
  bool is_taped = true;
};

/// In program order; none separates a group. Adds to `reasons`.
std::vector<Run> smallest_runs(const Graph& graph, const std::vector<NodeId>& nodes, std::vector<std::string>& reasons) {
  const std::vector<NodeId> first_of_group = node_groups(graph);
  std::vector<size_t> last_of_group(graph.nodes.size(), 0);
  for (size_t i = 0; i < nodes.size(); ++i) last_of_group[first_of_group[nodes[i]]] = i;
  std::vector<Run> runs;
  size_t end = 0;  // of the run, as far as is known
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (i >= end) runs.emplace_back();
    runs.back().nodes.push_back(nodes[i]);
    if (std::string why = why_untaped(graph, graph.nodes[static_cast<size_t>(nodes[i])]); !why.empty()) {
      runs.back().is_taped = false;
      if (std::find(reasons.begin(), reasons.end(), why) == reasons.end()) reasons.push_back(std::move(why));
    }
    end = std::max(end, last_of_group[first_of_group[nodes[i]]] + 1);
  }
  return runs;
}

std::vector<Run> joined(const std::vector<Run>& runs) {
  std::vector<Run> all;
  for (const Run& run : runs) {
    if (all.empty() || all.back().is_taped != run.is_taped) all.push_back({.nodes = {}, .is_taped = run.is_taped});
    all.back().nodes.insert(all.back().nodes.end(), run.nodes.begin(), run.nodes.end());
  }
  return all;
}

}  // namespace

std::optional<Segments> cut_into_segments(const Graph& graph, const Plan& plan, int stage) {
  std::vector<std::string> reasons;
  std::vector<Run> runs = joined(smallest_runs(graph, plan.stages[static_cast<size_t>(stage)].nodes, reasons));
  for (Run& run : runs) run.is_taped = run.is_taped && run.nodes.size() >= kFewestOperators;
  runs = joined(runs);
  if (runs.size() < 2) return std::nullopt;

  const int num_more = static_cast<int>(runs.size()) - 1;
  Segments segments{.plan = {}, .first = stage, .is_taped = {}, .reasons = std::move(reasons)};
  Plan& cut = segments.plan;
  cut.num_ranks = plan.num_ranks;
  cut.exact_ties = plan.exact_ties;
  cut.stages = plan.stages;
  for (StagePlan& one : cut.stages) one.cost = {};
  cut.stages.insert(cut.stages.begin() + stage, runs.size() - 1, cut.stages[static_cast<size_t>(stage)]);
  cut.stage_of_node = plan.stage_of_node;
  for (int& of_node : cut.stage_of_node) of_node += of_node > stage ? num_more : 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    const int segment = stage + static_cast<int>(i);
    for (const NodeId n : runs[i].nodes) cut.stage_of_node[static_cast<size_t>(n)] = segment;
    segments.is_taped.push_back(runs[i].is_taped);
  }
  derive(graph, cut);
  return segments;
}

}  // namespace smp::partitioner
