// Groups of operators that must share a stage, by union-find; cuts follow from them.
#include "partitioner/graph/cuts.h"

#include <algorithm>
#include <numeric>

namespace smp::partitioner {
namespace {

class UnionFind {
 public:
  explicit UnionFind(size_t size) : parent_(size) { std::iota(parent_.begin(), parent_.end(), 0); }

  NodeId find(NodeId node) {
    while (parent_[node] != node) node = parent_[node] = parent_[parent_[node]];
    return node;
  }
  void unite(NodeId a, NodeId b) {
    a = find(a);
    b = find(b);
    parent_[std::max(a, b)] = std::min(a, b);
  }

 private:
  std::vector<NodeId> parent_;
};

/// The nodes that touch one storage, in program order.
struct StorageUse {
  std::vector<NodeId> nodes;
  NodeId last_write = kNoNode;  // a write by the creating node is its creation
};

std::vector<StorageUse> uses_by_storage(const Graph& graph, size_t num_storages, const std::vector<char>& is_named) {
  std::vector<StorageUse> uses(num_storages);
  const auto touch = [&](int32_t storage, NodeId node) {
    if (storage < 0) return;
    auto& nodes = uses[storage].nodes;
    if (nodes.empty() || nodes.back() != node) nodes.push_back(node);
  };
  for (NodeId n = 0; n < static_cast<NodeId>(graph.nodes.size()); ++n) {
    const Node& node = graph.nodes[n];
    for (ValueId id : node_inputs(node)) touch(graph.values[id].storage, n);
    for (ValueId id : node.outputs) {
      if (id != kNoValue) touch(graph.values[id].storage, n);
    }
    for (int32_t storage : node.written_storages) {
      touch(storage, n);
      if (is_named[storage] || uses[storage].nodes.front() != n) uses[storage].last_write = n;
    }
  }
  return uses;
}

bool is_dense(const TensorSpec& spec) {
  if (spec.num_elements() == 0) return true;
  std::vector<std::pair<int64_t, int64_t>> stride_and_size;
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    const bool is_expanded = spec.strides[d] == 0;
    if (spec.sizes[d] != 1 && !is_expanded) {
      stride_and_size.emplace_back(spec.strides[d], spec.sizes[d]);
    }
  }
  std::sort(stride_and_size.begin(), stride_and_size.end());
  int64_t expected_stride = 1;
  for (const auto& [stride, size] : stride_and_size) {
    if (stride != expected_stride) return false;
    expected_stride *= size;
  }
  return true;
}

/// A view from before the last write to its memory, read after it.
bool is_stale_view(const Value& value, NodeId reader, const std::vector<StorageUse>& uses) {
  if (value.storage < 0) return false;
  const StorageUse& use = uses[value.storage];
  const bool is_view = use.nodes.front() < value.producer;
  return is_view && value.producer < use.last_write && use.last_write < reader;
}

/// Whether a value keeps its geometry, and its meaning, when it is sent. `storage_extent_bytes`: storage_bytes(graph).
bool can_travel(const Graph& graph, ValueId id, const std::vector<int64_t>& storage_extent_bytes) {
  const Value& value = graph.values[id];
  if (value.spec.num_elements() == 0) return true;
  if (value.storage < 0) return value.spec.storage_offset == 0 && is_dense(value.spec);
  return value.spec.storage_offset == 0 && is_dense(value.spec) &&
         extent_bytes(value.spec) == storage_extent_bytes[value.storage];
}

}  // namespace

int64_t extent_bytes(const TensorSpec& spec) {
  if (spec.num_elements() == 0) return 0;
  int64_t last = spec.storage_offset;
  for (size_t d = 0; d < spec.sizes.size(); ++d) last += (spec.sizes[d] - 1) * spec.strides[d];
  return (last + 1) * static_cast<int64_t>(c10::elementSize(spec.dtype));
}

std::vector<int64_t> storage_bytes(const Graph& graph) {
  std::vector<int64_t> bytes(graph.num_storages(), 0);
  for (const Value& value : graph.values) {
    if (value.storage < 0) continue;
    bytes[value.storage] = std::max(bytes[value.storage], extent_bytes(value.spec));
  }
  return bytes;
}

std::vector<NodeId> node_groups(const Graph& graph) {
  UnionFind groups(graph.nodes.size());
  const std::vector<char> is_named = storages_of(graph, [](const Value& value) { return value.kind != ValueKind::kResult; });
  const std::vector<StorageUse> uses = uses_by_storage(graph, is_named.size(), is_named);
  for (size_t s = 0; const StorageUse& use : uses) {
    const bool is_kept = is_named[s++];
    if (use.last_write == kNoNode) continue;
    for (NodeId node : use.nodes) {
      if (is_kept || node <= use.last_write) groups.unite(use.nodes.front(), node);
    }
  }
  const std::vector<int64_t> extents = storage_bytes(graph);
  const std::vector<char> is_parameter =
      storages_of(graph, [](const Value& value) { return value.kind == ValueKind::kParameter; });
  for (NodeId n = 0; n < static_cast<NodeId>(graph.nodes.size()); ++n) {
    for (ValueId id : node_inputs(graph.nodes[n])) {
      const Value& value = graph.values[id];
      if (value.kind != ValueKind::kResult) continue;
      if (is_stale_view(value, n, uses)) groups.unite(value.producer, n);
      const bool is_weight_view = value.storage >= 0 && is_parameter[value.storage];
      if (is_weight_view || !can_travel(graph, id, extents)) groups.unite(value.producer, n);
    }
  }
  std::vector<NodeId> first_of_group(graph.nodes.size());
  for (NodeId n = 0; n < static_cast<NodeId>(graph.nodes.size()); ++n) {
    first_of_group[n] = groups.find(n);
  }
  return first_of_group;
}

std::vector<char> allowed_cuts(const Graph& graph) {
  const std::vector<NodeId> first_of_group = node_groups(graph);
  const auto num_nodes = static_cast<NodeId>(graph.nodes.size());
  std::vector<NodeId> last_of_group(graph.nodes.size());
  for (NodeId n = 0; n < num_nodes; ++n) last_of_group[first_of_group[n]] = n;
  std::vector<char> allowed(graph.nodes.size() + 1, 1);
  NodeId spanned_until = 0;  // cuts before nodes up to this one lie inside a group
  for (NodeId p = 0; p < num_nodes; ++p) {
    allowed[p] = p == 0 || p > spanned_until ? 1 : 0;
    spanned_until = std::max(spanned_until, last_of_group[first_of_group[p]]);
  }
  return allowed;
}

}  // namespace smp::partitioner
