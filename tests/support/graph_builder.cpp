// Small graphs by hand.
#include "tests/support/graph_builder.h"

#include <algorithm>

namespace smp::testing {

using partitioner::Graph;
using partitioner::kNoValue;
using partitioner::Node;
using partitioner::TensorSpec;
using partitioner::Value;
using partitioner::ValueKind;
using partitioner::ValueRef;

namespace {

Value make_value(ValueKind kind, const std::string& name, const TensorSpec& spec, int32_t storage = -1) {
  Value value;
  value.kind = kind;
  value.name = name;
  value.spec = spec;
  value.storage = storage;
  return value;
}

}  // namespace

TensorSpec contiguous_spec(const std::vector<int64_t>& sizes, c10::ScalarType dtype) {
  TensorSpec spec{.sizes = sizes, .strides = std::vector<int64_t>(sizes.size()), .dtype = dtype};
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) spec.strides[d] = stride;
  return spec;
}

partitioner::ValueId GraphBuilder::add_value(Value value) {
  if (value.storage < 0) value.storage = num_storages_++;
  graph_.values.push_back(std::move(value));
  return static_cast<ValueId>(graph_.values.size()) - 1;
}

partitioner::ValueId GraphBuilder::add_node(const std::string& op, const std::vector<ValueId>& arguments, Value output) {
  Node node;
  node.op = op;
  for (ValueId id : arguments) {
    node.arguments.push_back(ValueRef{id});
    output.spec.requires_grad |= graph_.values[id].spec.requires_grad;
  }
  output.producer = static_cast<partitioner::NodeId>(graph_.nodes.size());
  const ValueId id = add_value(std::move(output));
  node.outputs = {id};
  graph_.nodes.push_back(std::move(node));
  return id;
}

partitioner::ValueId GraphBuilder::input(const Sizes& sizes, c10::ScalarType dtype) {
  const ValueId id = add_value(
      make_value(ValueKind::kInput, "input." + std::to_string(graph_.inputs.size()), contiguous_spec(sizes, dtype)));
  graph_.inputs.push_back(id);
  return id;
}

partitioner::ValueId GraphBuilder::parameter(const std::string& name, const Sizes& sizes) {
  const ValueId id = add_value(make_value(ValueKind::kParameter, name, contiguous_spec(sizes)));
  graph_.values[id].spec.requires_grad = true;
  return id;
}

partitioner::ValueId GraphBuilder::buffer(const std::string& name, const Sizes& sizes) {
  return add_value(make_value(ValueKind::kBuffer, name, contiguous_spec(sizes)));
}

partitioner::ValueId GraphBuilder::constant(const Sizes& sizes, bool is_wrapped_number) {
  Value value = make_value(ValueKind::kConstant, "constant", contiguous_spec(sizes));
  value.is_wrapped_number = is_wrapped_number;
  return add_value(std::move(value));
}

partitioner::ValueId GraphBuilder::op(const std::string& op, const std::vector<ValueId>& arguments, const Sizes& sizes) {
  return add_node(op, arguments, make_value(ValueKind::kResult, "", contiguous_spec(sizes)));
}

partitioner::ValueId GraphBuilder::view(const std::string& op, ValueId base, const TensorSpec& spec) {
  return add_node(op, {base}, make_value(ValueKind::kResult, "", spec, graph_.values[base].storage));
}

partitioner::ValueId GraphBuilder::in_place(const std::string& op, ValueId target, const std::vector<ValueId>& others) {
  std::vector<ValueId> arguments = others;
  arguments.insert(arguments.begin(), target);
  const Value base = graph_.values[target];
  const ValueId id = add_node(op, arguments, make_value(ValueKind::kResult, "", base.spec, base.storage));
  graph_.nodes.back().written_storages = {base.storage};
  return id;
}

partitioner::ValueId GraphBuilder::linear(ValueId input, const std::string& name, int64_t features) {
  const int64_t in_features = graph_.values[input].spec.sizes.back();
  const ValueId weight = parameter(name + ".weight", {features, in_features});
  const ValueId bias = parameter(name + ".bias", {features});
  Sizes sizes = graph_.values[input].spec.sizes;
  sizes.back() = features;
  const ValueId output = op("aten::linear", {input, weight, bias}, sizes);
  graph_.nodes.back().module = name;
  return output;
}

partitioner::ValueId GraphBuilder::linear_with(ValueId input, ValueId weight) {
  Sizes sizes = graph_.values[input].spec.sizes;
  sizes.back() = graph_.values[weight].spec.sizes[0];
  return op("aten::linear", {input, weight}, sizes);
}

partitioner::ValueId GraphBuilder::relu(ValueId input) { return op("aten::relu", {input}, graph_.values[input].spec.sizes); }

partitioner::ValueId GraphBuilder::batch_norm(ValueId input, const std::string& name) {
  const int64_t channels = graph_.values[input].spec.sizes[1];
  const ValueId weight = parameter(name + ".weight", {channels});
  const ValueId mean = buffer(name + ".running_mean", {channels});
  const ValueId output = op("aten::batch_norm", {input, weight, mean}, graph_.values[input].spec.sizes);
  graph_.nodes.back().written_storages = {graph_.values[mean].storage};
  graph_.nodes.back().module = name;
  return output;
}

partitioner::ValueId GraphBuilder::sum(ValueId input) { return op("aten::sum", {input}, {}); }

Graph GraphBuilder::build(ValueId backward_root) const {
  Graph graph = graph_;
  if (backward_root != kNoValue) graph.backward_roots = graph.returned = {backward_root};
  return graph;
}

}  // namespace smp::testing
