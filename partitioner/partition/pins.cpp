// Pins by longest prefix, and the texts for pins that cannot hold.
#include "partitioner/partition/pins.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string>

#include "partitioner/graph/gradient_flow.h"
#include "partitioner/partition/edit_distance.h"

namespace smp::partitioner {
namespace {

bool is_path_prefix(const std::string& prefix, const std::string& path) {
  return prefix.empty() || path == prefix ||
         (path.size() > prefix.size() && path.starts_with(prefix) && path[prefix.size()] == '.');
}

/// Every path that a pin may name: "a.b.weight" gives a, a.b and a.b.weight.
std::set<std::string> known_paths(const Graph& graph, const GivenPlacement& placement) {
  std::set<std::string> paths{""};
  const auto add = [&paths](const std::string& path) {
    for (size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', dot + 1)) {
      paths.insert(path.substr(0, dot));
    }
    paths.insert(path);
  };
  for (const Value& value : graph.values) {
    if (is_named(value)) add(value.name);
  }
  for (const Node& node : graph.nodes) add(node.module);
  for (const std::string& module : placement.known_modules) add(module);
  return paths;
}

std::string closest(const std::string& path, const std::set<std::string>& paths) {
  return *std::min_element(paths.begin(), paths.end(),
                           [&](const auto& a, const auto& b) { return edit_distance(path, a) < edit_distance(path, b); });
}

void check_rank(int rank, int num_ranks, const std::string& what) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < num_ranks, "partition: expected a rank from 0 to ", num_ranks - 1, " for ", what,
                    ", got ", rank, ". Start more ranks or choose one of these.");
}

RankSet ranks_of(const std::string& name, const GivenPlacement& placement) {
  if (const auto home = placement.homes.find(name); home != placement.homes.end()) {
    RankSet ranks = home->second.whole_on();
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }
  const std::pair<const std::string, int>* longest = nullptr;
  for (const auto& pin : placement.pins) {
    const bool is_longer = longest == nullptr || pin.first.size() > longest->first.size();
    if (is_longer && is_path_prefix(pin.first, name)) longest = &pin;
  }
  if (longest != nullptr) return {longest->second};
  if (!placement.auto_partition) return {placement.default_partition};
  return {};
}

std::string to_text(const RankSet& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

/// Narrows the ranks of one block parameter by parameter, and remembers which one narrowed it last.
class BlockRanks {
 public:
  BlockRanks(const Graph& graph, int first_node, int end_node)
      : graph_(graph), first_node_(first_node), end_node_(end_node) {}

  void require(const std::string& name, const RankSet& required, bool is_adder = false) {
    if (required.empty()) return;
    if (ranks_.empty()) {
      ranks_ = required;
      reason_ = name;
      return;
    }
    RankSet common;
    std::set_intersection(ranks_.begin(), ranks_.end(), required.begin(), required.end(), std::back_inserter(common));
    if (common.empty()) refuse(name, required, is_adder);
    if (common.size() < ranks_.size()) reason_ = name;
    ranks_ = common;
  }
  const RankSet& ranks() const { return ranks_; }

 private:
  std::string describe(int node) const {
    const Node& n = graph_.nodes[node];
    return n.op + (n.module.empty() ? "" : " in " + n.module);
  }
  void refuse(const std::string& name, const RankSet& required, bool is_adder) const {
    TORCH_CHECK_VALUE(
        false, "partition: expected one rank for operators ", first_node_, " (", describe(first_node_), ") to ",
        end_node_ - 1, " (", describe(end_node_ - 1),
        "), which no cut may separate (in-place writes, a norm's of its statistics in evaluation too; values that cannot "
        "be sent), got '",
        reason_, "' on rank ", to_text(ranks_), " and '", name, "' on rank ", to_text(required),
        is_adder ? ", where exact_tied_weights adds up its gradient in other programs. Set exact_tied_weights to false, pin"
                 : ". Pin",
        " both to one rank, or replace the in-place operator between them.");
  }

  const Graph& graph_;
  int first_node_, end_node_;
  RankSet ranks_;
  std::string reason_;
};

}  // namespace

void check_pins(const Graph& graph, const GivenPlacement& placement, int num_ranks) {
  if (!placement.auto_partition) {
    check_rank(placement.default_partition, num_ranks, "default_partition");
  }
  for (const auto& [name, home] : placement.homes) {
    TORCH_CHECK_VALUE(!home.whole_on().empty(), "partition: expected a rank that holds '", name, "', got none.");
    for (int rank : home.whole_on()) check_rank(rank, num_ranks, "the owner of '" + name + "'");
  }
  if (placement.pins.empty()) return;
  const std::set<std::string> paths = known_paths(graph, placement);
  for (const auto& [path, rank] : placement.pins) {
    check_rank(rank, num_ranks, "the pin of '" + path + "'");
    if (paths.contains(path)) continue;
    TORCH_CHECK_VALUE(false, "partition: expected a module or parameter of the model in a pin, got '", path,
                      "'. Did you mean '", closest(path, paths), "'?");
  }
}

std::vector<RankSet> allowed_ranks(const Graph& graph, const std::vector<NodeId>& order, const std::vector<int>& starts,
                                   const GivenPlacement& placement) {
  std::vector<RankSet> ranks_of_value(graph.values.size());
  std::set<ValueId> waits_for_adder;
  for (size_t v = 0; v < graph.values.size(); ++v) {
    if (!is_named(graph.values[v])) continue;
    ranks_of_value[v] = ranks_of(graph.values[v].name, placement);
    if (placement.adders.contains(graph.values[v].name)) waits_for_adder.insert(static_cast<ValueId>(v));
  }
  const GradientFlow flow(graph);
  std::vector<RankSet> allowed;
  for (size_t b = 0; b < starts.size(); ++b) {
    const int end = b + 1 < starts.size() ? starts[b + 1] : static_cast<int>(order.size());
    BlockRanks block(graph, order[starts[b]], order[end - 1] + 1);
    std::vector<ValueId> trained_first;
    for (int p = starts[b]; p < end; ++p) {
      for (ValueId id : node_inputs(graph.nodes[order[p]])) {
        if (is_named(graph.values[id])) block.require(graph.values[id].name, ranks_of_value[id]);
        if (flow.passes_gradient(order[p]) && waits_for_adder.erase(id)) trained_first.push_back(id);
      }
    }
    for (ValueId id : trained_first) {
      const std::string& name = graph.values[id].name;
      block.require(name, {placement.adders.at(name)}, /*is_adder=*/true);
    }
    allowed.push_back(block.ranks());
  }
  return allowed;
}

}  // namespace smp::partitioner
