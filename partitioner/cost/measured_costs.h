// Microseconds of operators that were run and timed, by what they are: operator, shapes and arguments.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// One operator for one microbatch.
struct OperatorTime {
  double forward_us = 0;
  double backward_us = 0;
  bool operator==(const OperatorTime&) const = default;
};

/// What decides how long `node` takes: its name, the sizes, strides, dtypes and roles of the tensors that it reads, which of
/// them want gradients, all other arguments, and its module: numbers decide too, and denormal ones, which take ten times as
/// long, are found in some layers only. Two nodes with one key are one operator run twice.
std::string operator_key(const Graph& graph, const Node& node);

class MeasuredCosts {
 public:
  /// By NodeId; nodes with one key count with their mean, nodes without a time not at all. What was known of a key is
  /// replaced.
  void add(const Graph& graph, const std::vector<std::optional<OperatorTime>>& times);
  /// Null when no such operator was timed.
  const OperatorTime* find(const Graph& graph, const Node& node) const;
  /// Whether all operators of `graph` were timed.
  bool covers(const Graph& graph) const;
  size_t size() const { return times_.size(); }

  /// Averaging of gradients over two replicas, with all that belongs to it; 0: not measured.
  double averaging_us_per_mib() const { return averaging_us_per_mib_; }
  void set_averaging_us_per_mib(double us) { averaging_us_per_mib_ = us; }

  /// JSON, to send and to keep: {key: [forward, backward]}, and "averaging" where it is not 0.
  std::string to_json() const;
  /// Adds what `to_json` has written. Throws c10::ValueError, and adds nothing, for any other text.
  void add_json(std::string_view text);

 private:
  std::map<std::string, OperatorTime, std::less<>> times_;
  double averaging_us_per_mib_ = 0;
};

}  // namespace smp::partitioner
