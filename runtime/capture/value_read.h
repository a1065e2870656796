// What a body in progress asks when it reads a value, and which values the step's inputs alone decide.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/capture/recording.h"

namespace smp::runtime {

/// Values that the body wants to know now.
struct ValueRead {
  std::shared_ptr<const Recording> matched;  // what the run equals so far, and will be taken to equal; null: it is new
  const partitioner::Graph& graph;           // holds the run's operators so far: its first num_nodes
  partitioner::NodeId num_nodes = 0;
  std::vector<partitioner::ValueId> values{};
  bool is_local = false;                               // the step's inputs and constants alone decide them
  std::vector<partitioner::ScalarOverride> scalars{};  // where the run differs from `graph`
  std::vector<ConstantContent> changed_constants{};    // and from the constants recorded with it
  std::vector<ConstantContent> constants{};            // content of every constant used so far
};

/// Returns real tensors, by ValueRead::values.
using ValueReader = std::function<std::vector<at::Tensor>(const ValueRead&)>;

/// The operators, among the first `num_nodes`, that have to run for `values`, in program order; nothing when parameters,
/// buffers or random numbers are needed too.
std::optional<std::vector<partitioner::NodeId>> local_slice(const partitioner::Graph& graph, partitioner::NodeId num_nodes,
                                                            const std::vector<partitioner::ValueId>& values);

}  // namespace smp::runtime
