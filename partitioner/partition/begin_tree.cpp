// Range addition, and search by two minima.
#include "partitioner/partition/begin_tree.h"

#include <algorithm>
#include <limits>

namespace smp::partitioner {

void BeginTree::reset(const std::vector<Begin>& begins) {
  size_ = begins.size();
  nodes_.resize(std::max(nodes_.size(), 4 * size_));
  build(1, 0, size_, begins);
}

void BeginTree::build(size_t node, size_t first, size_t end, const std::vector<Begin>& begins) {
  nodes_[node].added_us = 0;
  if (end - first == 1) {
    nodes_[node].least = begins[first];
    return;
  }
  const size_t middle = first + (end - first) / 2;
  build(2 * node, first, middle, begins);
  build(2 * node + 1, middle, end, begins);
  pull(node);
}

void BeginTree::pull(size_t node) {
  const Begin &left = nodes_[2 * node].least, &right = nodes_[2 * node + 1].least;
  const double added_us = nodes_[node].added_us;
  nodes_[node].least = {std::min(left.us, right.us) + added_us, std::min(left.traffic_us, right.traffic_us) + added_us};
}

void BeginTree::add(size_t first, size_t end, double us) {
  if (first < end) add_below(1, 0, size_, first, end, us);
}

void BeginTree::add_below(size_t node, size_t node_first, size_t node_end, size_t first, size_t end, double us) {
  if (end <= node_first || node_end <= first) return;
  if (first <= node_first && node_end <= end) {
    nodes_[node].least.us += us;
    nodes_[node].least.traffic_us += us;
    nodes_[node].added_us += us;
    return;
  }
  const size_t middle = node_first + (node_end - node_first) / 2;
  add_below(2 * node, node_first, middle, first, end, us);
  add_below(2 * node + 1, middle, node_end, first, end, us);
  pull(node);
}

struct BeginTree::Query {
  size_t first, end;
  double extra_us, limit_us;
  double least_us = std::numeric_limits<double>::infinity();
  std::optional<Found> best{};

  bool is_worse(double traffic_us, size_t index) const {
    return best && (traffic_us > best->begin.traffic_us || (traffic_us == best->begin.traffic_us && index > best->index));
  }
};

std::optional<BeginTree::Found> BeginTree::find(size_t first, size_t end, double extra_us, double limit_us,
                                                double& least_us) const {
  Query query{.first = first, .end = end, .extra_us = extra_us, .limit_us = limit_us};
  find_below(1, 0, size_, 0, query);
  least_us = query.least_us;
  return query.best;
}

void BeginTree::find_below(size_t node, size_t node_first, size_t node_end, double added_us, Query& query) const {
  if (query.end <= node_first || node_end <= query.first) return;
  const double us = nodes_[node].least.us + added_us + query.extra_us;
  const double traffic_us = nodes_[node].least.traffic_us + added_us;
  if (us > query.limit_us) query.least_us = std::min(query.least_us, us);
  if (us > query.limit_us || query.is_worse(traffic_us, node_first)) return;
  if (node_end - node_first == 1) {
    query.best = Found{node_first, {us, traffic_us}};
    return;
  }
  // The child with less traffic first: what it finds mostly spares the other.
  const size_t middle = node_first + (node_end - node_first) / 2;
  added_us += nodes_[node].added_us;
  const size_t left = 2 * node, right = left + 1;
  if (nodes_[left].least.traffic_us <= nodes_[right].least.traffic_us) {
    find_below(left, node_first, middle, added_us, query);
    find_below(right, middle, node_end, added_us, query);
  } else {
    find_below(right, middle, node_end, added_us, query);
    find_below(left, node_first, middle, added_us, query);
  }
}

}  // namespace smp::partitioner
