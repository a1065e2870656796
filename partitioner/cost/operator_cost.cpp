// Operator costs from the table and the sizes of what goes in and out.
#include "partitioner/cost/operator_cost.h"

#include <algorithm>

#include "partitioner/cost/operator_table.h"

namespace smp::partitioner {
namespace {

/// Bytes that one repetition of an expanded tensor occupies: what a kernel really reads.
double bytes_read(const TensorSpec& spec) {
  double bytes = static_cast<double>(c10::elementSize(spec.dtype));
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (spec.strides.size() != spec.sizes.size() || spec.strides[d] != 0) {
      bytes *= static_cast<double>(spec.sizes[d]);
    }
  }
  return bytes;
}

struct Operands {
  double input_bytes = 0;
  double looked_up_bytes = 0;  // size of argument 0 of a look-up
  double output_bytes = 0;
  double output_elements = 0;
  double accumulated_bytes = 0;       // parameters with a gradient
  int num_factors_with_gradient = 0;  // products
  int num_addends_with_gradient = 0;  // products: a bias
  bool are_half = false;              // products: 16 bits each
  Work casts, casts_back;             // of inputs, of their gradients
};

/// A parameter, or a view of one.
bool is_parameter(const Graph& graph, ValueId id) {
  while (graph.values[id].kind == ValueKind::kResult) {
    const Node& node = graph.nodes[graph.values[id].producer];
    const auto* base = node.arguments.empty() ? nullptr : std::get_if<ValueRef>(&node.arguments.front());
    if (base == nullptr || base->id == kNoValue || !moves_nothing(graph, node)) return false;
    id = base->id;
  }
  return graph.values[id].kind == ValueKind::kParameter;
}

struct Factors {
  int with_gradient = 0;  // x * x has two
  int parameters = 0;     // of them
};

Factors factors_of(const Graph& graph, const Node& node, const OperatorRow& row) {
  Factors factors;
  const auto count = [&](ValueId id) {
    if (id == kNoValue || !graph.values[id].spec.requires_grad) return;
    ++factors.with_gradient;
    factors.parameters += is_parameter(graph, id);
  };
  const size_t end = std::min<size_t>(row.first_factor + row.num_factors, node.arguments.size());
  for (size_t position = row.first_factor; position < end; ++position) {
    const Argument& argument = node.arguments[position];
    if (const auto* value = std::get_if<ValueRef>(&argument)) count(value->id);
    if (const auto* list = std::get_if<ValueRefList>(&argument)) {
      for (ValueId id : list->ids) count(id);
    }
  }
  return factors;
}

int addends_with_gradient(const Graph& graph, const Node& node, const OperatorRow& row) {
  int num = 0;
  for (size_t position = 0; position < node.arguments.size(); ++position) {
    const bool is_factor = position >= row.first_factor && position < size_t{row.first_factor} + row.num_factors;
    const auto* value = std::get_if<ValueRef>(&node.arguments[position]);
    if (is_factor || value == nullptr || value->id == kNoValue) continue;
    num += graph.values[value->id].spec.requires_grad;
  }
  return num;
}

bool is_float(c10::ScalarType dtype) { return dtype == c10::ScalarType::Float; }
bool is_half(c10::ScalarType dtype) { return c10::isFloatingType(dtype) && c10::elementSize(dtype) == 2; }

bool has_result(const Graph& graph, const Node& node, bool (*is_wanted)(c10::ScalarType)) {
  const ValueId output = node.outputs.empty() ? kNoValue : node.outputs.front();
  return output != kNoValue && is_wanted(graph.values[output].spec.dtype);
}

Operands measure(const Graph& graph, const Node& node, const OperatorRow& row) {
  Operands operands;
  bool is_first = true;
  for (ValueId id : node_inputs(node)) {
    const Value& value = graph.values[id];
    const double bytes = bytes_read(value.spec);
    (row.is_lookup && is_first ? operands.looked_up_bytes : operands.input_bytes) += bytes;
    is_first = false;
    if (!value.spec.requires_grad) continue;
    if (value.kind == ValueKind::kParameter) operands.accumulated_bytes += bytes;
  }
  if (row.is_product) {
    operands.num_factors_with_gradient = factors_of(graph, node, row).with_gradient;
    operands.num_addends_with_gradient = addends_with_gradient(graph, node, row);
  }
  operands.are_half = has_result(graph, node, is_half);
  for (const auto& [id, bytes] : casts(graph, node)) {
    operands.casts.kernels += 1;
    operands.casts.bytes += 2 * static_cast<double>(bytes);  // written and read again
    if (!graph.values[id].spec.requires_grad) continue;
    operands.casts_back.kernels += 1;
    operands.casts_back.bytes += 2 * static_cast<double>(bytes);
  }
  for (ValueId id : node.outputs) {
    if (id == kNoValue) continue;
    operands.output_bytes += static_cast<double>(graph.values[id].spec.num_bytes());
    operands.output_elements += static_cast<double>(graph.values[id].spec.num_elements());
  }
  return operands;
}

}  // namespace

std::vector<Cast> casts(const Graph& graph, const Node& node) {
  if (!node.autocast.enabled || !is_half(node.autocast.dtype)) return {};
  const OperatorRow& row = operator_row(node);
  const bool narrows = row.flops != nullptr && has_result(graph, node, is_half);
  // What computes with operands of several types as they are (mul) keeps them so.
  const bool keeps = (row.saves != kSavesNothing && (row.saves & kSavesOperands) == 0) || row.extra_saved_bytes != nullptr;
  const bool widens = row.flops == nullptr && keeps && has_result(graph, node, is_float);
  std::vector<Cast> found;
  for (const ValueId id : node_inputs(node)) {
    const TensorSpec& spec = graph.values[id].spec;
    if (narrows && spec.dtype == c10::ScalarType::Float) found.push_back({id, spec.num_bytes() / 2});
    if (widens && is_half(spec.dtype)) found.push_back({id, spec.num_bytes() * 2});
  }
  return found;
}

bool has_backward(const Graph& graph, const Node& node) {
  if (!node.grad_enabled) return false;
  for (ValueId id : node.outputs) {
    if (id != kNoValue && graph.values[id].spec.requires_grad) return true;
  }
  return false;
}

double parameter_share_of_backward(const Graph& graph, const Node& node) {
  const OperatorRow& row = operator_row(node);
  if (!has_backward(graph, node)) return 0;
  if (row.is_product) {
    const Factors factors = factors_of(graph, node, row);
    return factors.with_gradient == 0 ? 0 : static_cast<double>(factors.parameters) / factors.with_gradient;
  }
  const std::vector<ValueId> inputs = node_inputs(node);
  const bool looks_up = row.is_lookup && !inputs.empty();
  return looks_up && graph.values[inputs.front()].kind == ValueKind::kParameter ? 1 : 0;
}

OperatorCost operator_cost(const Graph& graph, const Node& node, bool trains) {
  const OperatorRow& row = operator_row(node);
  const Operands operands = measure(graph, node, row);
  OperatorCost cost;
  Work& forward = cost.forward;
  forward.kernels = row.kernels ? row.kernels(graph, node) : 1;
  if (!moves_nothing(graph, node)) {
    (operands.are_half ? forward.half_flops : forward.flops) = row.flops ? row.flops(graph, node) : 0;
    forward.bytes = operands.input_bytes + operands.output_bytes * (row.is_lookup ? 2 : 1);
    forward.transcendentals = row.transcendentals_per_element * operands.output_elements;
    forward.randoms = row.randoms_per_element * operands.output_elements;
  }
  const auto add = [](Work& work, const Work& casts) {
    work.bytes += casts.bytes;
    work.kernels += casts.kernels;
  };
  if (!trains || !has_backward(graph, node)) {
    add(forward, operands.casts);
    return cost;
  }
  const double factor = row.is_product ? operands.num_factors_with_gradient : row.backward_factor;
  cost.backward.flops = factor * forward.flops;
  cost.backward.half_flops = factor * forward.half_flops;
  // Reading the sum so far and writing the new one; a look-up also fills its dense gradient with
  // zeros. The gradient of a bias is the sum of the output's.
  cost.backward.bytes = factor * forward.bytes + 2 * operands.accumulated_bytes + operands.looked_up_bytes +
                        operands.num_addends_with_gradient * operands.output_bytes;
  cost.backward.kernels = forward.kernels;
  add(forward, operands.casts);
  add(cost.backward, operands.casts_back);
  return cost;
}

}  // namespace smp::partitioner
