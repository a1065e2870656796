// Where the recorded program may be cut, and which operators must share a stage.
#pragma once

#include <cstdint>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// By NodeId: the smallest node that must run on the same stage, itself if there is none. Two reasons:
///
/// - A storage that is written after its creation: everything that touches it, from its creation to its last
///   write, shares a stage (a received tensor is a leaf of its own; an in-place write there would
///   miss the others). If it belongs to a parameter, buffer, input or constant, later readers share
///   that stage, too: what is written is the one copy that this rank keeps. So do later
///   readers of a value from before the last write, a view: autograd makes it anew from what was
///   written.
/// - A value that cannot travel, because it does not begin and fill its storage or is not
///   dense in some order of dimensions, expanded ones aside, or that is a view of a parameter (weights would be sent in
///   every microbatch): its producer and its readers share a stage. The base of a view may still travel: then the view
///   itself is replayed on the reader's side, because it runs there.
///
/// Parameters, buffers, inputs and constants are no activations: they are wherever they are read.
std::vector<NodeId> node_groups(const Graph& graph);

/// By position, num_nodes + 1 entries: whether a cut may lie before node p. A group is never cut.
std::vector<char> allowed_cuts(const Graph& graph);

/// Extent in bytes of every alias set, by storage number: the largest end of a value that lies on
/// it. An expanded dimension adds nothing.
std::vector<int64_t> storage_bytes(const Graph& graph);

/// Bytes from the start of the storage to the end of the tensor.
int64_t extent_bytes(const TensorSpec& spec);

/// By storage number: whether a value that `is_wanted` lies on it.
template <class Wanted>
std::vector<char> storages_of(const Graph& graph, const Wanted& is_wanted) {
  std::vector<char> is_there(graph.num_storages(), 0);
  for (const Value& value : graph.values) {
    if (value.storage >= 0 && is_wanted(value)) is_there[static_cast<size_t>(value.storage)] = 1;
  }
  return is_there;
}

}  // namespace smp::partitioner
