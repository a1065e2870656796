// The backward walk over storages: a write to memory that is needed is needed too.
#include <set>

#include "runtime/capture/value_read.h"

namespace smp::runtime {

using namespace partitioner;

std::optional<std::vector<NodeId>> local_slice(const Graph& graph, NodeId num_nodes, const std::vector<ValueId>& values) {
  std::set<int32_t> needed;
  for (ValueId id : values) {
    if (is_named(graph.values[id])) return std::nullopt;
    needed.insert(graph.values[id].storage);
  }
  std::vector<NodeId> slice;
  for (NodeId n = num_nodes; n-- > 0;) {
    const Node& node = graph.nodes[n];
    bool is_needed = false;
    for (ValueId id : node.outputs) is_needed = is_needed || (id != kNoValue && needed.contains(graph.values[id].storage));
    for (int32_t storage : node.written_storages) is_needed = is_needed || needed.contains(storage);
    if (!is_needed) continue;
    if (node.random_ordinal >= 0) return std::nullopt;
    for (ValueId id : node_inputs(node)) {
      if (is_named(graph.values[id])) return std::nullopt;
      needed.insert(graph.values[id].storage);
    }
    slice.push_back(n);
  }
  return std::vector<NodeId>(slice.rbegin(), slice.rend());
}

}  // namespace smp::runtime
