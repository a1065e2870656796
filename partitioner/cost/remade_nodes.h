// Which operators of a region have to run again.
#pragma once

#include <vector>

#include "partitioner/graph/gradient_flow.h"
#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// By storage: the piece in which it is made and that alone uses it; -1: it stays, or comes from elsewhere. `piece`: by
/// NodeId, a number for what is recomputed together, a region or a stage's part of one; -1: none. `is_kept`: operators that
/// do not run again, so that storages which they make or write to stay; empty: none.
std::vector<int32_t> inner_storages(const Graph& graph, const std::vector<int32_t>& piece, const std::vector<bool>& is_kept);

/// By NodeId: what makes an inner storage that a backward needs, or that is needed to make such.
std::vector<bool> remade_nodes(const Graph& graph, const GradientFlow& flow, const std::vector<int32_t>& piece,
                               const std::vector<bool>& is_kept);

}  // namespace smp::partitioner
