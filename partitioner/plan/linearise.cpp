// Topological orders of the graph whose nodes are what must share a stage.
#include "partitioner/plan/linearise.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "partitioner/graph/cuts.h"
#include "partitioner/graph/gradient_flow.h"

namespace smp::partitioner {
namespace {

using Lists = std::vector<std::vector<int>>;

void make_unique(Lists& lists) {
  for (auto& list : lists) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
  }
}

/// By node: the nodes that must come later.
Lists successors(const Graph& graph) {
  Lists later(graph.nodes.size());
  const GradientFlow flow(graph);
  const GradientSums sums(graph);
  std::vector<NodeId> last_reader(sums.is_ordered.size(), kNoNode);
  for (NodeId n = 0; n < static_cast<NodeId>(graph.nodes.size()); ++n) {
    for (ValueId id : node_inputs(graph.nodes[n])) {
      const NodeId producer = graph.values[id].producer;
      if (producer != kNoNode) later[producer].push_back(n);
      const int32_t sum = sums.sum_of_value[id];
      if (!sums.is_ordered[sum] || !flow.passes_gradient(n)) continue;
      const NodeId before = std::exchange(last_reader[sum], n);
      if (before != kNoNode && before != n) later[before].push_back(n);
    }
  }
  return later;
}

/// Numbers the strongly connected components of the graph whose nodes are groups: nodes between
/// two of one group belong to it. (Tarjan, SIAM J. Comput. 1972; without recursion)
class Components {
 public:
  explicit Components(const Lists& later)
      : later_(later), index_(later.size(), -1), low_(later.size()), of_(later.size(), -1) {
    for (int node = 0; node < static_cast<int>(later.size()); ++node) {
      if (index_[node] < 0) visit(node);
    }
  }
  const std::vector<int>& of() const { return of_; }

 private:
  void visit(int root) {
    std::vector<std::pair<int, size_t>> path{{root, 0}};
    open(root);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < later_[node].size()) {
        const int target = later_[node][next++];
        if (index_[target] < 0) {
          open(target);
          path.emplace_back(target, 0);
        } else if (of_[target] < 0) {
          low_[node] = std::min(low_[node], index_[target]);
        }
        continue;
      }
      const int done = node;
      path.pop_back();
      if (!path.empty()) low_[path.back().first] = std::min(low_[path.back().first], low_[done]);
      if (low_[done] == index_[done]) close(done);
    }
  }
  void open(int node) {
    index_[node] = low_[node] = count_++;
    stack_.push_back(node);
  }
  void close(int node) {
    for (int member = -1; member != node;) {
      member = stack_.back();
      stack_.pop_back();
      of_[member] = node;
    }
  }

  const Lists& later_;
  std::vector<int> index_, low_, of_, stack_;
  int count_ = 0;
};

/// What is cut as a whole, and what depends on what.
struct Blocks {
  Lists nodes;  // ascending; blocks by their first node
  Lists later, earlier;

  explicit Blocks(const Graph& graph) {
    const std::vector<NodeId> group = node_groups(graph);
    Lists of_group(graph.nodes.size());
    const Lists of_node = successors(graph);
    for (size_t n = 0; n < of_node.size(); ++n) {
      for (int target : of_node[n]) {
        if (group[target] != group[n]) of_group[group[n]].push_back(group[target]);
      }
    }
    make_unique(of_group);
    const Components components(of_group);
    std::vector<int> block_of(graph.nodes.size(), -1), number(graph.nodes.size(), -1);
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      int& block = number[components.of()[group[n]]];
      if (block < 0) {
        block = static_cast<int>(nodes.size());
        nodes.emplace_back();
      }
      block_of[n] = block;
      nodes[block].push_back(static_cast<int>(n));
    }
    later.resize(nodes.size());
    earlier.resize(nodes.size());
    for (size_t n = 0; n < of_node.size(); ++n) {
      for (int target : of_node[n]) {
        if (block_of[target] == block_of[n]) continue;
        later[block_of[n]].push_back(block_of[target]);
        earlier[block_of[target]].push_back(block_of[n]);
      }
    }
    make_unique(later);
    make_unique(earlier);
  }
  int size() const { return static_cast<int>(nodes.size()); }
};

/// Blocks in the order in which `best` takes them from those that are ready: it gets the ready ones
/// and the block before, and returns a position among them.
template <class Best>
std::vector<int> take_in_turn(const Blocks& blocks, const Best& best) {
  std::vector<int> waits_for(blocks.later.size()), order, ready;
  for (int b = blocks.size(); b-- > 0;) {
    waits_for[b] = static_cast<int>(blocks.earlier[b].size());
    if (waits_for[b] == 0) ready.push_back(b);
  }
  while (!ready.empty()) {
    const size_t at = best(ready, order);
    const int block = ready[at];
    ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(at));
    order.push_back(block);
    // The first in program order stands last, where depth first looks.
    for (auto next = blocks.later[block].rbegin(); next != blocks.later[block].rend(); ++next) {
      if (--waits_for[*next] == 0) ready.push_back(*next);
    }
  }
  return order;
}

std::vector<int> depth_first(const Blocks& blocks) {
  return take_in_turn(blocks, [](const auto& ready, const auto&) { return ready.size() - 1; });
}

/// Of the blocks that the last one made ready, the one with the longest rest.
std::vector<int> longest_rest_first(const Blocks& blocks, const std::vector<double>& node_us) {
  std::vector<double> rest_us(blocks.later.size(), 0);
  const std::vector<int> order = depth_first(blocks);
  for (auto block = order.rbegin(); block != order.rend(); ++block) {
    for (int next : blocks.later[*block]) rest_us[*block] = std::max(rest_us[*block], rest_us[next]);
    for (int n : blocks.nodes[*block]) rest_us[*block] += node_us[n];
  }
  return take_in_turn(blocks, [&](const std::vector<int>& ready, const std::vector<int>& done) {
    size_t best = ready.size() - 1;
    if (done.empty()) return best;
    const auto& fresh = blocks.later[done.back()];
    for (size_t i = ready.size(); i-- > 0;) {
      if (!std::binary_search(fresh.begin(), fresh.end(), ready[i])) break;
      if (rest_us[ready[i]] > rest_us[ready[best]]) best = i;
    }
    return best;
  });
}

/// Bytes that each value would add to a cut, and which blocks read it.
class LiveBytes {
 public:
  LiveBytes(const Graph& graph, const Blocks& blocks) : values_(blocks.nodes.size()) {
    std::vector<int> block_of(graph.nodes.size());
    for (int b = 0; b < blocks.size(); ++b) {
      for (int n : blocks.nodes[b]) block_of[n] = b;
    }
    readers_.assign(graph.values.size(), 0);
    bytes_.assign(graph.values.size(), 0);
    for (const Value& value : graph.values) {
      if (value.kind != ValueKind::kResult) continue;
      const auto id = static_cast<size_t>(&value - graph.values.data());
      bytes_[id] = extent_bytes(value.spec);
      values_[block_of[value.producer]].push_back(static_cast<int>(id));
    }
    for (int b = 0; b < blocks.size(); ++b) {
      std::vector<int> read;
      for (int n : blocks.nodes[b]) {
        for (ValueId id : node_inputs(graph.nodes[n])) {
          const Value& value = graph.values[id];
          const bool crosses = value.kind == ValueKind::kResult && block_of[value.producer] != b;
          if (crosses) read.push_back(id);
        }
      }
      std::sort(read.begin(), read.end());
      read.erase(std::unique(read.begin(), read.end()), read.end());
      for (ValueId id : read) ++readers_[id];
      reads_.push_back(std::move(read));
    }
  }
  /// What `block` would change.
  int64_t change(int block) const {
    int64_t bytes = 0;
    for (ValueId id : values_[block]) bytes += readers_[id] > 0 ? bytes_[id] : 0;
    for (ValueId id : reads_[block]) bytes -= readers_[id] == 1 ? bytes_[id] : 0;
    return bytes;
  }
  void take(int block) {
    for (ValueId id : reads_[block]) --readers_[id];
  }

 private:
  Lists values_, reads_;  // by block
  std::vector<int> readers_;
  std::vector<int64_t> bytes_;
};

/// Looks at the latest ready blocks only, so that it stays linear.
std::vector<int> fewest_bytes_first(const Graph& graph, const Blocks& blocks) {
  constexpr size_t kWindow = 16;
  LiveBytes live(graph, blocks);
  return take_in_turn(blocks, [&](const std::vector<int>& ready, const std::vector<int>&) {
    const size_t first = ready.size() - std::min(ready.size(), kWindow);
    size_t best = ready.size() - 1;
    int64_t least = live.change(ready[best]);
    for (size_t i = best; i-- > first;) {
      const int64_t change = live.change(ready[i]);
      if (change < least) {
        least = change;
        best = i;
      }
    }
    live.take(ready[best]);
    return best;
  });
}

Linearisation lay_out(const Blocks& blocks, const std::vector<int>& order, size_t num_nodes) {
  Linearisation result;
  result.cut_allowed.assign(num_nodes + 1, 0);
  for (int block : order) {
    result.cut_allowed[result.nodes.size()] = 1;
    result.nodes.insert(result.nodes.end(), blocks.nodes[block].begin(), blocks.nodes[block].end());
  }
  result.cut_allowed[num_nodes] = 1;
  return result;
}

}  // namespace

GradientSums::GradientSums(const Graph& graph) : sum_of_value(graph.values.size()) {
  const auto num_values = static_cast<int32_t>(graph.values.size());
  std::vector<char> is_written(graph.num_storages(), 0);
  for (const Node& node : graph.nodes) {
    for (int32_t storage : node.written_storages) is_written[storage] = 1;
  }
  for (int32_t v = 0; v < num_values; ++v) {
    const int32_t storage = graph.values[v].storage;
    sum_of_value[v] = storage >= 0 && is_written[storage] ? num_values + storage : v;
  }
  std::vector<int> num_terms(graph.values.size() + is_written.size(), 0);
  for (ValueId root : graph.backward_roots) ++num_terms[sum_of_value[root]];
  const GradientFlow flow(graph);
  const auto count = [&](ValueId id) {
    if (id != kNoValue && flow.receives_gradient(id)) ++num_terms[sum_of_value[id]];
  };
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (!flow.passes_gradient(static_cast<NodeId>(n))) continue;
    for (const Argument& argument : graph.nodes[n].arguments) {
      if (const auto* value = std::get_if<ValueRef>(&argument)) count(value->id);
      if (const auto* list = std::get_if<ValueRefList>(&argument)) {
        for (ValueId id : list->ids) count(id);
      }
    }
  }
  for (const int terms : num_terms) is_ordered.push_back(terms > 1 ? 1 : 0);
}

Linearisation program_order(const Graph& graph) {
  Linearisation result{std::vector<NodeId>(graph.nodes.size()), allowed_cuts(graph)};
  std::iota(result.nodes.begin(), result.nodes.end(), 0);
  return result;
}

std::vector<Linearisation> linearisations(const Graph& graph, const std::vector<double>& node_us) {
  std::vector<Linearisation> all{program_order(graph)};
  const Blocks blocks(graph);
  for (const auto& order : {depth_first(blocks), longest_rest_first(blocks, node_us), fewest_bytes_first(graph, blocks)}) {
    Linearisation next = lay_out(blocks, order, graph.nodes.size());
    const auto same_nodes = [&](const Linearisation& known) { return known.nodes == next.nodes; };
    if (std::none_of(all.begin(), all.end(), same_nodes)) all.push_back(std::move(next));
  }
  return all;
}

}  // namespace smp::partitioner
