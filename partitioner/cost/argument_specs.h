// Arguments of a recorded call by position. Internal to the cost room.
#pragma once

#include <variant>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// The tensor at `position`, of a list its first; an empty one where there is none.
inline const TensorSpec& spec_of_argument(const Graph& graph, const Node& node, size_t position) {
  static const TensorSpec kEmpty{.sizes = {0}, .strides = {1}};
  if (position >= node.arguments.size()) return kEmpty;
  const Argument& argument = node.arguments[position];
  ValueId id = kNoValue;
  if (const auto* value = std::get_if<ValueRef>(&argument)) id = value->id;
  if (const auto* list = std::get_if<ValueRefList>(&argument); list && !list->ids.empty()) {
    id = list->ids[0];
  }
  return id == kNoValue ? kEmpty : graph.values[id].spec;
}

/// The argument at `position`; `otherwise` where there is none of this type.
template <class Type>
Type argument_or(const Node& node, size_t position, Type otherwise) {
  if (position >= node.arguments.size()) return otherwise;
  const auto* found = std::get_if<Type>(&node.arguments[position]);
  return found == nullptr ? otherwise : *found;
}

}  // namespace smp::partitioner
