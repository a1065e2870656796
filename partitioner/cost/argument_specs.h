// Arguments of a recorded call by position. Internal to the cost room.
#pragma once

#include <variant>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

inline const TensorSpec kNoTensor{.sizes = {0}, .strides = {1}};

/// The tensor at `position`, of a list its first; an empty one where there is none.
inline const TensorSpec& spec_of_argument(const Graph& graph, const Node& node, size_t position) {
  if (position >= node.arguments.size()) return kNoTensor;
  const Argument& argument = node.arguments[position];
  ValueId id = kNoValue;
  if (const auto* value = std::get_if<ValueRef>(&argument)) id = value->id;
  if (const auto* list = std::get_if<ValueRefList>(&argument); list && !list->ids.empty()) {
    id = list->ids[0];
  }
  return id == kNoValue ? kNoTensor : graph.values[id].spec;
}

/// The first output; an empty one where there is none.
inline const TensorSpec& spec_of_output(const Graph& graph, const Node& node) {
  const bool is_there = !node.outputs.empty() && node.outputs[0] != kNoValue;
  return is_there ? graph.values[node.outputs[0]].spec : kNoTensor;
}

/// Graphs may come from anywhere: a tensor may have fewer dimensions than its operator takes. `otherwise` where it has.
inline int64_t size_or(const TensorSpec& spec, size_t dimension, int64_t otherwise) {
  return dimension < spec.sizes.size() ? spec.sizes[dimension] : otherwise;
}

/// The argument at `position`; `otherwise` where there is none of this type.
template <class Type>
Type argument_or(const Node& node, size_t position, Type otherwise) {
  if (position >= node.arguments.size()) return otherwise;
  const auto* found = std::get_if<Type>(&node.arguments[position]);
  return found == nullptr ? otherwise : *found;
}

}  // namespace smp::partitioner
