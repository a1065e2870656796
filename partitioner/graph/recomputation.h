// What runs a second time before its backward, so that it need not be kept in between.
#pragma once

#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

inline constexpr int32_t kNoRegion = -1;

/// By NodeId; both empty: nothing runs again.
struct Recomputation {
  std::vector<int32_t> region{};  // what is cut out of its stage together: what enters it is kept; kNoRegion: none
  std::vector<bool> is_kept{};    // what these operators of a region make stays; empty: no operator's does
  bool operator==(const Recomputation&) const = default;

  bool is_empty() const { return region.empty(); }
  int32_t region_of(NodeId n) const { return region.empty() ? kNoRegion : region[static_cast<size_t>(n)]; }
  bool keeps(NodeId n) const { return !is_kept.empty() && is_kept[static_cast<size_t>(n)]; }
};

/// As the body marks it. Without backwards there is none.
Recomputation marked_recomputation(const Graph& graph);

/// Takes operators out of their region with which others must stay (node_groups) that are not in it, and all between them;
/// and operators by foreign code, which may count its calls; and keeps what operators make that write to parameters or
/// buffers, which is done once.
void make_possible(const Graph& graph, Recomputation& recomputation);

}  // namespace smp::partitioner
