// Arguments of a recorded call by position. Internal to the cost room.
#pragma once

#include <variant>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

inline const TensorSpec& no_tensor() {
  static const TensorSpec kNone{.sizes = {0}, .strides = {1}};
  return kNone;
}

/// The argument at `position`; null where there is none of this type.
template <class Type>
const Type* argument_if(const Node& node, size_t position) {
  return position < node.arguments.size() ? std::get_if<Type>(&node.arguments[position]) : nullptr;
}

/// The same; `otherwise` where there is none.
template <class Type>
Type argument_or(const Node& node, size_t position, Type otherwise) {
  const Type* found = argument_if<Type>(node, position);
  return found == nullptr ? otherwise : *found;
}

/// The tensor at `position`, of a list its first; an empty one where there is none.
inline const TensorSpec& spec_of_argument(const Graph& graph, const Node& node, size_t position) {
  ValueId id = argument_or(node, position, ValueRef{kNoValue}).id;
  if (const auto* list = argument_if<ValueRefList>(node, position); list && !list->ids.empty()) id = list->ids[0];
  return id == kNoValue ? no_tensor() : graph.values[id].spec;
}

/// The first output; an empty one where there is none.
inline const TensorSpec& spec_of_output(const Graph& graph, const Node& node) {
  const bool is_there = !node.outputs.empty() && node.outputs[0] != kNoValue;
  return is_there ? graph.values[node.outputs[0]].spec : no_tensor();
}

/// Graphs may come from anywhere: a tensor may have fewer dimensions than its operator takes. `otherwise` where it has.
inline int64_t size_or(const TensorSpec& spec, size_t dimension, int64_t otherwise) {
  return dimension < spec.sizes.size() ? spec.sizes[dimension] : otherwise;
}

}  // namespace smp::partitioner
