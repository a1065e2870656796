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
/// - A value that cannot travel (`can_travel`), or that is a view of a parameter (weights would be sent in every
///   microbatch): its producer and its readers share a stage. The base of a view may still travel:
///   then the view itself is replayed on the reader's side, because it runs there.
///
/// Parameters, buffers, inputs and constants are no activations: they are wherever they are read.
std::vector<NodeId> node_groups(const Graph& graph);

/// By position, num_nodes + 1 entries: whether a cut may lie before node p. A group is never cut.
std::vector<char> allowed_cuts(const Graph& graph);

/// Whether a value keeps its geometry, and its meaning, when it is sent: it begins its storage and
/// fills it, is non-overlapping and dense in some order of dimensions, expanded dimensions aside.
/// `storage_extent_bytes`: storage_bytes(graph).
bool can_travel(const Graph& graph, ValueId value, const std::vector<int64_t>& storage_extent_bytes);

/// Extent in bytes of every alias set, by storage number: the largest end of a value that lies on
/// it. An expanded dimension adds nothing.
std::vector<int64_t> storage_bytes(const Graph& graph);

/// Bytes from the start of the storage to the end of the tensor.
int64_t extent_bytes(const TensorSpec& spec);

/// By storage number: whether a parameter, buffer, input or constant lies on it.
std::vector<char> is_named_storage(const Graph& graph);

}  // namespace smp::partitioner
