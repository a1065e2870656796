// A recorded step body and what is needed to recognise a second run of it: data, how it grows, and questions about it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/capture/constants.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/operator_info.h"

namespace smp::runtime {

/// An in-place operator carries gradients to all tensors on the memory that it writes to.
struct GradientChange {
  partitioner::ValueId first;  // of the values that have been this ghost
  bool requires_grad;          // from now on
};

/// One operator of a recording, ready to be compared with a call.
struct RecordedCall {
  c10::OperatorHandle op;
  const OperatorInfo* info;
  bool returns_list = false;      // its single result is a Tensor[]
  bool fixes_scalars = false;     // its result is one of its arguments, which other numbers may change
  int32_t recompute_region = -1;  // within which it was called; the node's may be that of a marked module
  bool synthesised = false;       // an alias made behind the dispatcher; nobody will call it again
  std::vector<GradientChange> gradients{};
};

/// Whether `value` may stand in place of the argument `recorded` without another graph: another number of the same type
/// that leaves the geometry alone.
bool may_travel(const RecordedCall& call, size_t position, const partitioner::Argument& value,
                const partitioner::Argument& recorded);

/// The graph with the handles and constants that go with it on the rank that recorded it.
struct Recording {
  partitioner::Graph graph;
  std::vector<RecordedCall> calls;  // by NodeId
  /// By ValueId: parameters and buffers.
  std::vector<at::Tensor> tensors;
  /// By ValueId: the first value with the same TensorImpl (in-place results share it).
  std::vector<partitioner::ValueId> same_impl;
  std::vector<ConstantTensor> constants;
  /// By Value::storage: that of its ghosts, in every run. None where there is no ghost.
  std::vector<c10::Storage> storages;
  /// Of the values that have any.
  std::unordered_map<partitioner::ValueId, LazySigns> signs;
  uint64_t hash = 0;          // of the graph
  uint64_t last_use = 0;      // counts the runs of its body
  std::string last_module{};  // while it grows: of the parameter or buffer used last; "" before any was

  /// What is added next.
  partitioner::NodeId next_node() const { return static_cast<partitioner::NodeId>(graph.nodes.size()); }
  partitioner::ValueId next_value() const { return static_cast<partitioner::ValueId>(graph.values.size()); }
  /// `before`: what the same TensorImpl was, if it was a value.
  partitioner::ValueId add_value(partitioner::Value value, partitioner::ValueId before = partitioner::kNoValue);
  /// Adds an operator that no run of the body calls; returns its result.
  partitioner::ValueId synthesise(const char* op, std::vector<partitioner::Argument> arguments, partitioner::TensorSpec spec,
                                  int32_t storage, bool grad_enabled);
  /// For texts: the module, and how those begin that name no operator.
  const std::string& module() const;
  std::string where() const;
};

/// One run of a step body, as data: which recording, and what differs from it.
struct CapturedBody {
  std::shared_ptr<const Recording> recording;
  std::vector<partitioner::ScalarOverride> scalars;
  std::vector<ConstantContent> constants;  // copies, as they were when the body used them
  std::vector<at::Tensor> outside{};       // constants of this run, as the program has them
};

/// Values that the body wants to know now.
struct ValueRead {
  std::shared_ptr<const Recording> matched{};  // what the run equals so far, and will be taken to equal; null: it is new
  const partitioner::Graph& graph;             // holds the run's operators so far: its first num_nodes
  partitioner::NodeId num_nodes = 0;
  std::vector<partitioner::ValueId> values{};
  bool is_local = false;                               // the step's inputs and constants alone decide them
  std::vector<partitioner::ScalarOverride> scalars{};  // where the run differs from `graph`
  std::vector<ConstantContent> changed_constants{};    // and from the constants recorded with it
  std::vector<ConstantContent> constants{};            // content of every constant used so far
};

/// Returns real tensors, by ValueRead::values.
using ValueReader = std::function<std::vector<at::Tensor>(const ValueRead&)>;

/// Whether two recordings agree on their first `num_nodes` operators, numbers aside that may change between runs.
bool same_beginning(const Recording& a, const Recording& b, partitioner::NodeId num_nodes);

/// The value that keeps the content which `value` has after the first `position` operators of a recording: itself, if
/// none writes to it later; kNoValue, if nothing keeps it.
partitioner::ValueId kept_value(const Recording& recording, partitioner::ValueId value, partitioner::NodeId position);

/// How many values the first `num_nodes` operators use or make: the first ones, for values are numbered in order of
/// appearance. Those first used by the next operator do not count.
partitioner::ValueId values_of_prefix(const partitioner::Graph& graph, partitioner::NodeId num_nodes);

/// The operators, among the first `num_nodes`, that have to run for `values`, in program order; nothing when parameters,
/// buffers or random numbers are needed too.
std::optional<std::vector<partitioner::NodeId>> local_slice(const partitioner::Graph& graph, partitioner::NodeId num_nodes,
                                                            const std::vector<partitioner::ValueId>& values);

}  // namespace smp::runtime
