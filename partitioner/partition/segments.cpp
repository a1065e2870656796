// A stage as runs of operators that are taped, or are not, and of those that run again in the backward.
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
  int32_t region = kNoRegion;  // that it recomputes

  bool is_like(const Run& other) const { return is_taped == other.is_taped && region == other.region; }
};

/// In program order; none separates a group. Adds to `reasons`.
std::vector<Run> smallest_runs(const Graph& graph, const Plan& plan, int stage, std::vector<std::string>& reasons) {
  const std::vector<NodeId>& nodes = plan.stages[static_cast<size_t>(stage)].nodes;
  const std::vector<NodeId> first_of_group = node_groups(graph);
  std::vector<size_t> last_of_group(graph.nodes.size(), 0);
  for (size_t i = 0; i < nodes.size(); ++i) last_of_group[first_of_group[nodes[i]]] = i;
  std::vector<Run> runs;
  size_t end = 0;  // of the run, as far as is known
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto n = static_cast<size_t>(nodes[i]);
    if (i >= end) runs.emplace_back().region = plan.recomputation.region_of(nodes[i]);
    runs.back().nodes.push_back(nodes[i]);
    if (std::string why = why_untaped(graph, graph.nodes[n]); !why.empty()) {
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
    if (all.empty() || !all.back().is_like(run))
      all.push_back({.nodes = {}, .is_taped = run.is_taped, .region = run.region});
    all.back().nodes.insert(all.back().nodes.end(), run.nodes.begin(), run.nodes.end());
  }
  return all;
}

/// Short runs go with a neighbour on autograd that is recomputed as they are.
std::vector<Run> without_short_tapes(std::vector<Run> runs) {
  const auto takes = [&](size_t neighbour, const Run& run) {
    return neighbour < runs.size() && !runs[neighbour].is_taped && runs[neighbour].region == run.region;
  };
  std::vector<bool> stays(runs.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    const bool is_short = runs[i].nodes.size() < kFewestOperators;
    stays[i] = runs[i].is_taped && !(is_short && (takes(i - 1, runs[i]) || takes(i + 1, runs[i])));
  }
  for (size_t i = 0; i < runs.size(); ++i) runs[i].is_taped = stays[i];
  return joined(runs);
}

}  // namespace

std::optional<Segments> cut_into_segments(const Graph& graph, const Plan& plan, int stage, bool has_tapes) {
  std::vector<std::string> reasons;
  std::vector<Run> runs = smallest_runs(graph, plan, stage, reasons);
  if (!has_tapes) {
    for (Run& run : runs) run.is_taped = false;
    reasons.clear();
  }
  runs = without_short_tapes(joined(runs));
  if (runs.size() < 2 && runs.front().region == kNoRegion) return std::nullopt;

  const int num_more = static_cast<int>(runs.size()) - 1;
  Segments segments{.plan = {}, .first = stage, .is_taped = {}, .is_recomputed = {}, .reasons = std::move(reasons)};
  Plan& cut = segments.plan;
  cut.num_ranks = plan.num_ranks;
  cut.exact_ties = plan.exact_ties;
  cut.recomputation = plan.recomputation;
  cut.stages = plan.stages;
  for (StagePlan& one : cut.stages) one.cost = {};
  cut.stages.insert(cut.stages.begin() + stage, runs.size() - 1, cut.stages[static_cast<size_t>(stage)]);
  cut.stage_of_node = plan.stage_of_node;
  for (int& of_node : cut.stage_of_node) of_node += of_node > stage ? num_more : 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    const int segment = stage + static_cast<int>(i);
    for (const NodeId n : runs[i].nodes) cut.stage_of_node[static_cast<size_t>(n)] = segment;
    segments.is_taped.push_back(runs[i].is_taped);
    segments.is_recomputed.push_back(runs[i].region != kNoRegion);
  }
  derive(graph, cut);
  return segments;
}

}  // namespace smp::partitioner
