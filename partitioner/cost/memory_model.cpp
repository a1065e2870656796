// What autograd keeps, by the operator table.
#include "partitioner/cost/memory_model.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>

#include "partitioner/cost/operator_cost.h"
#include "partitioner/cost/operator_table.h"
#include "partitioner/graph/cuts.h"

namespace smp::partitioner {
namespace {

/// Tensor arguments in order, repeated ones included: x * x has two.
std::vector<ValueId> tensor_arguments(const Node& node) {
  std::vector<ValueId> ids;
  for (const Argument& argument : node.arguments) {
    if (const auto* value = std::get_if<ValueRef>(&argument)) ids.push_back(value->id);
    if (const auto* list = std::get_if<ValueRefList>(&argument)) {
      ids.insert(ids.end(), list->ids.begin(), list->ids.end());
    }
  }
  std::erase(ids, kNoValue);
  return ids;
}

size_t num_copies(const Graph& graph, const Node& node, const OperatorRow& row) {
  return row.num_copies == nullptr ? 0 : static_cast<size_t>(row.num_copies(graph, node));
}

bool is_saved(const Graph& graph, const OperatorRow& row, const std::vector<ValueId>& arguments, size_t position) {
  const TensorSpec& spec = graph.values[arguments[position]].spec;
  if (row.saves & kSavesInputs) return true;
  if ((row.saves & kSavesIndices) && c10::isIntegralType(spec.dtype, /*includeBool=*/true)) {
    return true;
  }
  if (!(row.saves & kSavesOperands)) return false;
  for (size_t other = 0; other < arguments.size(); ++other) {
    if (other != position && graph.values[arguments[other]].spec.requires_grad) return true;
  }
  return false;
}

/// Calls use(argument, bytes of a copy) for what the call keeps for its backward: the argument, then 0, or a copy of other
/// precision.
template <class Use>
void for_saved_arguments(const Graph& graph, const Node& node, const Use& use) {
  const OperatorRow& row = operator_row(node);
  const std::vector<ValueId> arguments = tensor_arguments(node);
  const std::vector<Cast> all_casts = casts(graph, node);
  for (size_t position = num_copies(graph, node, row); position < arguments.size(); ++position) {
    if (!is_saved(graph, row, arguments, position)) continue;
    const auto cast =
        std::find_if(all_casts.begin(), all_casts.end(), [&](const Cast& one) { return one.input == arguments[position]; });
    use(arguments[position], cast == all_casts.end() ? 0 : cast->bytes);
  }
}

}  // namespace

ParameterBytes parameter_bytes(const Value& value, double optimizer_state_factor) {
  const int64_t bytes = extent_bytes(value.spec);
  if (value.kind != ValueKind::kParameter || !value.spec.requires_grad) return {bytes, 0, 0};
  return {bytes, bytes, static_cast<int64_t>(std::llround(optimizer_state_factor * static_cast<double>(bytes)))};
}

std::vector<char> permanent_storages(const Graph& graph) {
  return storages_of(graph, [](const Value& value) { return is_named(value) || value.kind == ValueKind::kConstant; });
}

std::vector<int32_t> saved_storages(const Graph& graph, const Node& node, const std::vector<char>& is_permanent) {
  std::vector<int32_t> storages;
  if (!has_backward(graph, node)) return storages;
  const OperatorRow& row = operator_row(node);
  const auto add = [&](ValueId id) {
    const int32_t storage = graph.values[id].storage;
    if (storage < 0 || is_permanent[storage]) return;
    if (std::find(storages.begin(), storages.end(), storage) == storages.end()) {
      storages.push_back(storage);
    }
  };
  for_saved_arguments(graph, node, [&](ValueId id, int64_t bytes_of_copy) {
    if (bytes_of_copy == 0) add(id);
  });
  for (ValueId id : node.outputs) {
    if (id != kNoValue && num_copies(graph, node, row) == 0 && (row.saves & kSavesOutputs)) add(id);
  }
  return storages;
}

int64_t cast_bytes(const Graph& graph, const Node& node) {
  int64_t bytes = 0;
  for (const Cast& cast : casts(graph, node)) bytes += cast.bytes;
  return bytes;
}

int64_t extra_saved_bytes(const Graph& graph, const Node& node) {
  if (!has_backward(graph, node)) return 0;
  const OperatorRow& row = operator_row(node);
  int64_t bytes = row.extra_saved_bytes ? row.extra_saved_bytes(graph, node) : 0;
  const std::vector<Cast> all_casts = casts(graph, node);
  const bool is_widened = std::any_of(all_casts.begin(), all_casts.end(), [&](const Cast& cast) {
    return cast.bytes > graph.values[cast.input].spec.num_bytes();
  });
  if (is_widened) bytes *= 2;  // formulas take the inputs as they are
  for_saved_arguments(graph, node, [&](ValueId, int64_t bytes_of_copy) { bytes += bytes_of_copy; });
  return bytes;
}

std::vector<int64_t> activation_bytes(const Graph& graph) {
  std::vector<int64_t> bytes(graph.nodes.size(), 0);
  if (!graph.has_backward()) return bytes;
  const std::vector<int64_t> bytes_of_storage = storage_bytes(graph);
  const std::vector<char> is_permanent = permanent_storages(graph);
  std::vector<char> is_counted(bytes_of_storage.size(), 0);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    bytes[n] = extra_saved_bytes(graph, graph.nodes[n]);
    for (int32_t storage : saved_storages(graph, graph.nodes[n], is_permanent)) {
      if (!is_counted[storage]) bytes[n] += bytes_of_storage[storage];
      is_counted[storage] = 1;
    }
  }
  return bytes;
}

}  // namespace smp::partitioner
