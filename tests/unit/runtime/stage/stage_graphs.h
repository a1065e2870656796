// Graphs of small stages whose operators have all their arguments, so that they can run; and numbers for their tensors.
#pragma once

#include <ATen/ops/arange.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "partitioner/partition/partition.h"
#include "tests/support/graph_builder.h"

namespace smp::runtime::stage_graphs {

using partitioner::Argument;
using partitioner::Graph;
using partitioner::NodeId;
using partitioner::Plan;
using partitioner::ValueId;
using smp::testing::GraphBuilder;

/// Of one tensor of these sizes; `begin` tells tensors apart.
inline at::Tensor numbers(const std::vector<int64_t>& sizes, double begin) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return at::arange(count, at::kFloat).mul_(0.37).add_(begin).sin_().reshape(sizes);
}

/// `name` as "aten::add.Tensor", tensors first, then the other arguments. The result has the sizes of the first tensor.
inline ValueId call(GraphBuilder& g, const std::string& name, const std::vector<ValueId>& tensors,
                    const std::vector<Argument>& others = {}) {
  const size_t dot = name.find('.');
  const ValueId result = g.op(name.substr(0, dot), tensors, g.spec(tensors.front()).sizes);
  if (dot != std::string::npos) g.last_node().overload = name.substr(dot + 1);
  g.last_node().arguments.insert(g.last_node().arguments.end(), others.begin(), others.end());
  return result;
}

inline ValueId mul(GraphBuilder& g, ValueId a, ValueId b) { return call(g, "aten::mul.Tensor", {a, b}); }

inline ValueId add(GraphBuilder& g, ValueId a, ValueId b) { return call(g, "aten::add.Tensor", {a, b}, {int64_t{1}}); }

/// target += other, without gradients.
inline ValueId add_in_place(GraphBuilder& g, ValueId target, ValueId other) {
  const ValueId result = g.in_place("aten::add_", target, {other});
  g.last_node().overload = "Tensor";
  g.last_node().arguments.emplace_back(int64_t{1});
  g.last_node().grad_enabled = false;
  return result;
}

inline ValueId loss_of(GraphBuilder& g, ValueId x) {
  const ValueId loss = g.sum(x);
  g.last_node().arguments.emplace_back();  // dtype
  return loss;
}

inline std::vector<NodeId> all_nodes(const Graph& graph) {
  std::vector<NodeId> nodes;
  for (size_t n = 0; n < graph.nodes.size(); ++n) nodes.push_back(static_cast<NodeId>(n));
  return nodes;
}

/// Modules by rank.
inline Plan pinned(const Graph& graph, int num_ranks, const std::map<std::string, int>& pins = {}) {
  partitioner::PartitionOptions options;
  options.request.num_ranks = num_ranks;
  options.request.num_microbatches = 4;
  options.placement.pins = pins;
  return partition(graph, options);
}

}  // namespace smp::runtime::stage_graphs
