#include "partitioner/cost/remade_nodes.h"

#include <algorithm>

#include "partitioner/cost/memory_model.h"

namespace smp::partitioner {
namespace {

constexpr int32_t kNone = -1, kUnseen = -2;

template <class Visit>
void for_each_storage(const Graph& graph, const std::vector<ValueId>& values, const Visit& visit) {
  for (const ValueId id : values) {
    if (id != kNoValue && graph.values[static_cast<size_t>(id)].storage >= 0) {
      visit(static_cast<size_t>(graph.values[static_cast<size_t>(id)].storage));
    }
  }
}

}  // namespace

std::vector<int32_t> inner_storages(const Graph& graph, const std::vector<int32_t>& piece,
                                    const std::vector<bool>& is_kept) {
  std::vector<int32_t> inner(graph.num_storages(), kUnseen);
  for (const Value& value : graph.values) {
    if (value.kind != ValueKind::kResult && value.storage >= 0) inner[static_cast<size_t>(value.storage)] = kNone;
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const bool keeps = !is_kept.empty() && is_kept[n];
    const auto use = [&](size_t storage) {
      if (inner[storage] == kUnseen) inner[storage] = keeps ? kNone : piece[n];
      if (inner[storage] != piece[n]) inner[storage] = kNone;
    };
    for_each_storage(graph, node_inputs(graph.nodes[n]), use);
    for_each_storage(graph, graph.nodes[n].outputs, use);
    for (const int32_t storage : graph.nodes[n].written_storages) {
      if (keeps) inner[static_cast<size_t>(storage)] = kNone;
    }
  }
  const auto leave = [&](size_t storage) { inner[storage] = kNone; };
  for_each_storage(graph, graph.returned, leave);
  for_each_storage(graph, graph.read, leave);
  for_each_storage(graph, graph.backward_roots, leave);
  return inner;
}

std::vector<bool> remade_nodes(const Graph& graph, const GradientFlow& flow, const std::vector<int32_t>& piece,
                               const std::vector<bool>& is_kept) {
  std::vector<bool> remade(graph.nodes.size(), false);
  const std::vector<int32_t> inner = inner_storages(graph, piece, is_kept);
  const std::vector<char> is_permanent = permanent_storages(graph);
  std::vector<bool> is_needed(inner.size(), false);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (piece[n] == kNone || !flow.passes_gradient(static_cast<NodeId>(n))) continue;
    for (const int32_t storage : saved_storages(graph, graph.nodes[n], is_permanent)) {
      is_needed[static_cast<size_t>(storage)] = true;
    }
  }
  for (size_t n = graph.nodes.size(); n-- > 0;) {
    const Node& node = graph.nodes[n];
    if (piece[n] == kNone || (!is_kept.empty() && is_kept[n])) continue;
    bool runs = flow.passes_gradient(static_cast<NodeId>(n)) && extra_saved_bytes(graph, node) > 0;
    const auto look = [&](size_t storage) { runs = runs || (is_needed[storage] && inner[storage] == piece[n]); };
    for_each_storage(graph, node.outputs, look);
    for (const int32_t storage : node.written_storages) look(static_cast<size_t>(storage));
    remade[n] = runs;
    if (runs) for_each_storage(graph, node_inputs(node), [&](size_t storage) { is_needed[storage] = true; });
  }
  return remade;
}

}  // namespace smp::partitioner
