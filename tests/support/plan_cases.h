// Graphs and options that the tests of planning share.
#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <string>

#include "partitioner/partition/partition.h"
#include "tests/support/graph_builder.h"

namespace smp::testing {

/// The text of the c10::ValueError that `call` throws; empty if it throws none.
inline std::string refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

/// `layers` times linear and relu, 64 wide, then the sum as loss.
inline partitioner::Graph mlp(int layers) {
  GraphBuilder g;
  partitioner::ValueId x = g.input({128, 64});
  for (int i = 0; i < layers; ++i) x = g.relu(g.linear(x, std::string("layers.").append(std::to_string(i)), 64));
  return g.build(g.sum(x));
}

/// linear a -> linear b -> linear c with tied weights of a and c, skip of a's output to the end.
struct Skip {
  GraphBuilder g;
  partitioner::ValueId x = g.input({8, 16});
  partitioner::ValueId weight = g.parameter("shared.weight", {16, 16});
  partitioner::ValueId a = g.linear_with(x, weight);
  partitioner::ValueId b = g.linear(a, "b", 16);
  partitioner::ValueId c = g.linear_with(b, weight);
  partitioner::ValueId d = g.op("aten::add", {c, a}, {8, 16});
  partitioner::ValueId loss = g.sum(d);
  partitioner::Graph graph = g.build(loss);
};

inline partitioner::PartitionOptions on_ranks(int num_ranks) {
  partitioner::PartitionOptions options;
  options.request.num_ranks = num_ranks;
  options.request.num_microbatches = 4;
  return options;
}

}  // namespace smp::testing
