// Orders in which the operators of a graph may be laid out before they are cut into stages.
#pragma once

#include <cstdint>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// All nodes in an order that respects what reads what.
struct Linearisation {
  std::vector<NodeId> nodes;
  std::vector<char> cut_allowed;  // by position, num_nodes + 1: whether a cut may lie before it
  bool operator==(const Linearisation&) const = default;
};

/// The order of the program, cut where allowed_cuts() says.
Linearisation program_order(const Graph& graph);

/// Program order first, then other orders without duplicates: depth first (one branch after the
/// other), depth first with the longest rest of the program ahead, and always what keeps the fewest
/// bytes alive. Branches that the program interleaves need not be cut both then.
///
/// Every cut keeps what node_groups() asks for. The readers of a value that add to its gradient are in program order in all
/// of them, so that the terms add up in the same order on every plan; two readers too, of which one may add several terms (a
/// composite operator, a recurrent layer). Operators of one stage run in program order in any case. `node_us`: by NodeId.
std::vector<Linearisation> linearisations(const Graph& graph, const std::vector<double>& node_us);

/// Whose gradient the readers of a value add to. A value by itself, a parameter too; all values on a storage that is written
/// in place together, since autograd makes views anew from what was written last.
struct GradientSums {
  explicit GradientSums(const Graph& graph);
  std::vector<int32_t> sum_of_value;
  /// By sum: whether several arguments of operators that backward passes through add to it, which they
  /// must do in program order.
  std::vector<char> is_ordered;
};

}  // namespace smp::partitioner
