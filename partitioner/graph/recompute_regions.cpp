#include "partitioner/graph/recompute_regions.h"

#include <algorithm>

#include "partitioner/graph/cuts.h"

namespace smp::partitioner {

std::vector<int32_t> recomputed_with(const Graph& graph) {
  std::vector<int32_t> regions(graph.nodes.size(), kKept);
  const auto is_marked = [](const Node& node) { return node.recompute_region != kKept; };
  if (!graph.has_backward() || std::none_of(graph.nodes.begin(), graph.nodes.end(), is_marked)) return regions;
  for (size_t n = 0; n < regions.size(); ++n) regions[n] = graph.nodes[n].recompute_region;
  const std::vector<char> may_cut_before = allowed_cuts(graph);
  for (size_t begin = 0, end; begin < regions.size(); begin = end) {
    end = begin + 1;
    while (end < regions.size() && may_cut_before[end] == 0) ++end;
    const bool is_one = std::all_of(regions.begin() + static_cast<ptrdiff_t>(begin), regions.begin() + static_cast<ptrdiff_t>(end),
                                    [&](int32_t region) { return region == regions[begin]; });
    if (!is_one) std::fill(regions.begin() + static_cast<ptrdiff_t>(begin), regions.begin() + static_cast<ptrdiff_t>(end), kKept);
  }
  return regions;
}

}  // namespace smp::partitioner
