// The begins that a stage may have, with what it costs from each: a segment tree.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace smp::partitioner {

/// Begins 0, 1, ..., each with a cost and with the traffic of the split that begins there. Sums are
/// exact as long as all numbers are multiples of one grain (chain_probe.h).
class BeginTree {
 public:
  struct Begin {
    double us = 0;
    double traffic_us = 0;
  };
  struct Found {
    size_t index = 0;
    Begin begin;
  };

  void reset(const std::vector<Begin>& begins);

  /// Adds to cost and traffic of the begins [first, end).
  void add(size_t first, size_t end, double us);

  /// Of the begins [first, end) that cost at most `limit_us`, `extra_us` included, the one with the least traffic, then the
  /// first. If there is none, `least_us` is not more than any of them costs.
  std::optional<Found> find(size_t first, size_t end, double extra_us, double limit_us, double& least_us) const;

 private:
  struct Node {
    Begin least;          // of each number on its own, what was added to the node included
    double added_us = 0;  // to all below
  };
  struct Query;

  void build(size_t node, size_t first, size_t end, const std::vector<Begin>& begins);
  void add_below(size_t node, size_t node_first, size_t node_end, size_t first, size_t end, double us);
  void find_below(size_t node, size_t node_first, size_t node_end, double added_us, Query& query) const;
  void pull(size_t node);

  size_t size_ = 0;
  std::vector<Node> nodes_;  // children of i at 2i and 2i + 1; the root is 1
};

}  // namespace smp::partitioner
