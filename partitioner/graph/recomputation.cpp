#include "partitioner/graph/recomputation.h"

#include <algorithm>

#include "partitioner/graph/cuts.h"
#include "partitioner/graph/untaped.h"

namespace smp::partitioner {

Recomputation marked_recomputation(const Graph& graph) {
  const auto is_marked = [](const Node& node) { return node.recompute_region != kNoRegion; };
  if (!graph.has_backward() || std::none_of(graph.nodes.begin(), graph.nodes.end(), is_marked)) return {};
  Recomputation marked;
  for (const Node& node : graph.nodes) marked.region.push_back(node.recompute_region);
  make_possible(graph, marked);
  return marked;
}

void make_possible(const Graph& graph, Recomputation& recomputation) {
  std::vector<int32_t>& region = recomputation.region;
  const std::vector<char> may_cut_before = allowed_cuts(graph);
  for (size_t begin = 0, end; begin < region.size(); begin = end) {
    end = begin + 1;
    while (end < region.size() && may_cut_before[end] == 0) ++end;
    const auto first = region.begin() + static_cast<ptrdiff_t>(begin), last = region.begin() + static_cast<ptrdiff_t>(end);
    if (std::any_of(first, last, [&](int32_t other) { return other != *first; })) std::fill(first, last, kNoRegion);
  }
  recomputation.is_kept.resize(region.size(), false);
  const std::vector<char> is_permanent = storages_of(
      graph, [](const Value& value) { return value.kind != ValueKind::kResult && value.kind != ValueKind::kInput; });
  for (size_t n = 0; n < region.size(); ++n) {
    if (is_foreign(graph.nodes[n].op)) region[n] = kNoRegion;
    const auto& written = graph.nodes[n].written_storages;
    const bool writes_own =
        std::any_of(written.begin(), written.end(), [&](int32_t storage) { return is_permanent[storage] != 0; });
    if (writes_own) recomputation.is_kept[n] = true;
  }
}

}  // namespace smp::partitioner
