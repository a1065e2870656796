// PipeDream profiles: parse, order, turn into a chain.
#include "tests/support/profiles.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

namespace smp::testing {
namespace {

using IdEdges = std::vector<std::pair<int, int>>;

double field(const std::string& line, const std::string& name) {
  const size_t at = line.find(name + "=");
  TORCH_CHECK_VALUE(at != std::string::npos, "profile: expected ", name, "= in '", line, "'");
  std::string text = line.substr(at + name.size() + 1);
  if (text.empty() || text[0] != '[') return std::stod(text);
  double sum = 0;  // several outputs: [6291456.0; 131072.0]
  std::istringstream list(text.substr(1, text.find(']') - 1));
  for (std::string item; std::getline(list, item, ';');) sum += std::stod(item);
  return sum;
}

Profile::Node parse_node(const std::string& line) {
  Profile::Node node;
  const size_t begin = line.find(" -- ") + 4;
  node.layer = line.substr(begin, line.rfind(" -- ") - begin);
  node.forward_us = 1000 * field(line, "forward_compute_time");
  node.backward_us = 1000 * field(line, "backward_compute_time");
  node.activation_bytes = field(line, "activation_size");
  node.parameter_bytes = field(line, "parameter_size");
  return node;
}

/// Depth-first in reverse, so that branches stay together, as a program would execute them.
std::vector<int> topological_order(const std::map<int, Profile::Node>& nodes, const IdEdges& edges) {
  std::map<int, int> missing_inputs;
  for (const auto& [id, node] : nodes) missing_inputs[id] = 0;
  for (const auto& [from, to] : edges) ++missing_inputs.at(to);
  std::vector<int> ready, order;
  for (auto it = missing_inputs.rbegin(); it != missing_inputs.rend(); ++it) {
    if (it->second == 0) ready.push_back(it->first);
  }
  while (!ready.empty()) {
    const int id = ready.back();
    ready.pop_back();
    order.push_back(id);
    for (const auto& [from, to] : edges) {
      if (from == id && --missing_inputs.at(to) == 0) ready.push_back(to);
    }
  }
  TORCH_CHECK_VALUE(order.size() == nodes.size(), "profile: expected no cycle, got one");
  return order;
}

}  // namespace

Profile read_profile(const std::string& path) {
  std::ifstream file(path);
  const std::regex node_line("node(\\d+) -- .* -- .*"), edge_line("\\s+node(\\d+) -- node(\\d+)\\s*");
  std::map<int, Profile::Node> nodes;
  IdEdges edges;
  std::smatch match;
  for (std::string line; std::getline(file, line);) {
    if (std::regex_match(line, match, node_line)) {
      nodes[std::stoi(match[1])] = parse_node(line);
    } else if (std::regex_match(line, match, edge_line)) {
      edges.emplace_back(std::stoi(match[1]), std::stoi(match[2]));
    }
  }
  TORCH_CHECK_VALUE(!nodes.empty(), "profile: expected nodes in ", path, ", got none");
  Profile profile;
  std::map<int, int> position;
  for (int id : topological_order(nodes, edges)) {
    position[id] = static_cast<int>(profile.nodes.size());
    profile.nodes.push_back(nodes.at(id));
  }
  for (const auto& [from, to] : edges) profile.edges.emplace_back(position.at(from), position.at(to));
  return profile;
}

partitioner::Chain chain_of(const Profile& profile, int num_stages, double gigabytes_per_second) {
  const int n = static_cast<int>(profile.nodes.size());
  partitioner::Chain chain;
  std::vector<std::vector<int>> readers(n);
  for (const auto& [from, to] : profile.edges) readers[from].push_back(to);
  for (int i = 0; i < n; ++i) {
    const auto& node = profile.nodes[i];
    chain.time_us.push_back(node.forward_us + node.backward_us);
    chain.fixed_bytes.push_back(static_cast<int64_t>(2 * node.parameter_bytes));  // and gradient
    if (readers[i].empty()) continue;
    std::sort(readers[i].begin(), readers[i].end());
    const double us = node.activation_bytes / (gigabytes_per_second * 1000);
    for (const bool is_gradient : {false, true}) chain.crossings.push_back({i, readers[i], us, is_gradient});
  }
  chain.activation_bytes.assign(n, 0);
  chain.cut_allowed.assign(n + 1, 1);
  chain.stages.resize(num_stages);
  return chain;
}

}  // namespace smp::testing
