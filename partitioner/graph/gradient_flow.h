// Which values receive a gradient when backward starts at a root of the graph.
#pragma once

#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// Walks the program backwards once. A storage that is written under grad mode from something that
/// requires a gradient counts as one: every value on it then carries the gradient, also those
/// recorded before the write without requires_grad (`out = zeros(...); out[0].copy_(x)`).
///
/// A superset: an argument that its operator does not differentiate is counted if it requires a gradient.
class GradientFlow {
 public:
  /// Of all backwards of the graph.
  explicit GradientFlow(const Graph& graph) : GradientFlow(graph, graph.backward_roots) {}
  /// Of the backwards that start at `roots`.
  GradientFlow(const Graph& graph, const std::vector<ValueId>& roots);

  bool receives_gradient(ValueId value) const;
  /// Whether backward passes through `node`, so that its arguments get their gradients there.
  bool passes_gradient(NodeId node) const { return passes_gradient_[node]; }

 private:
  bool requires_gradient(ValueId value) const;
  /// Without grad mode an operator that writes in place leaves the gradient function of what it writes to as it was.
  bool is_differentiated(const Node& node, ValueId id) const;
  bool visit(const Node& node) const;
  void mark(ValueId value);
  void find_written_storages();

  const Graph& graph_;
  std::vector<bool> value_;
  std::vector<bool> storage_;     // by alias set, only those of is_written_
  std::vector<bool> is_written_;  // alias sets that become differentiable by a write
  std::vector<bool> passes_gradient_;
};

}  // namespace smp::partitioner
