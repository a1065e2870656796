// Graphs as exact JSON, and back with every check that text of unknown origin needs.
#include "partitioner/graph/graph_io.h"

#include <algorithm>

#include "partitioner/graph/graph_json_io.h"
#include "partitioner/graph/tensor_bytes.h"

namespace smp::partitioner {
namespace {

using namespace json_io;

// Graph, nodes, node, arguments, argument, list, double: nothing of ours is deeper.
constexpr size_t kMaxGraphDepth = 8;

json::value write_value(const Value& value, const json::storage_ptr& storage) {
  const TensorSpec& spec = value.spec;
  return json::value({{"kind", kValueKinds[static_cast<size_t>(value.kind)]},
                      {"name", value.name},
                      {"sizes", array_of(spec.sizes, storage)},
                      {"strides", array_of(spec.strides, storage)},
                      {"storage_offset", spec.storage_offset},
                      {"dtype", c10::toString(spec.dtype)},
                      {"requires_grad", spec.requires_grad},
                      {"producer", value.producer},
                      {"output_index", value.output_index},
                      {"storage", value.storage},
                      {"is_wrapped_number", value.is_wrapped_number}},
                     storage);
}

json::value write_node(const Node& node, const json::storage_ptr& storage) {
  json::array arguments(storage);
  arguments.reserve(node.arguments.size());
  for (const Argument& argument : node.arguments) {
    arguments.push_back(write_argument(argument, storage));
  }
  return json::value({{"op", node.op},
                      {"overload", node.overload},
                      {"arguments", std::move(arguments)},
                      {"outputs", array_of(node.outputs, storage)},
                      {"written_storages", array_of(node.written_storages, storage)},
                      {"grad_enabled", node.grad_enabled},
                      {"autocast", node.autocast.enabled},
                      {"autocast_dtype", c10::toString(node.autocast.dtype)},
                      {"random_ordinal", node.random_ordinal},
                      {"recompute_region", node.recompute_region},
                      {"module", node.module}},
                     storage);
}

c10::ScalarType read_dtype(const json::value& value, const Where& where) {
  const std::string name = read_string(value, where);
  for (int i = 0; i < static_cast<int>(c10::ScalarType::Undefined); ++i) {
    if (name == c10::toString(static_cast<c10::ScalarType>(i))) {
      return static_cast<c10::ScalarType>(i);
    }
  }
  refuse(where, "a dtype of torch such as \"Float\"", describe(value));
}

/// Nobody may compute with an overflow.
void check_geometry(const TensorSpec& spec, const Where& where) {
  if (spec.sizes.size() != spec.strides.size()) {
    refuse(where.at("strides"), std::to_string(spec.sizes.size()) + " strides", std::to_string(spec.strides.size()));
  }
  if (!dense_bytes(spec.sizes, spec.dtype)) {
    refuse(where.at("sizes"), "fewer than 2^63 bytes", "more");
  }
  if (!extent_bytes(spec.sizes, spec.strides, spec.dtype, spec.storage_offset)) {
    refuse(where.at("strides"), "a last element before byte 2^63", "one behind it");
  }
}

ValueKind read_kind(const json::value& value, const Where& where) {
  const std::string name = read_string(value, where);
  const auto* found = std::find(kValueKinds.begin(), kValueKinds.end(), name);
  if (found == kValueKinds.end()) {
    refuse(where, "parameter, buffer, input, constant or result", describe(value));
  }
  return static_cast<ValueKind>(found - kValueKinds.begin());
}

/// Each alias set is that of some value, so that a table of them is no longer than the graph.
Value read_value(const json::value& json, const Where& where, int32_t num_nodes, int32_t num_values) {
  Fields fields(json, where);
  Value value;
  value.kind = read_kind(fields["kind"], where.at("kind"));
  value.name = read_string(fields["name"], where.at("name"));
  value.spec.sizes = read_integers(fields["sizes"], where.at("sizes"), 0);
  value.spec.strides = read_integers(fields["strides"], where.at("strides"), 0);
  value.spec.storage_offset = read_integer(fields["storage_offset"], where.at("storage_offset"), 0);
  value.spec.dtype = read_dtype(fields["dtype"], where.at("dtype"));
  value.spec.requires_grad = read_bool(fields["requires_grad"], where.at("requires_grad"));
  const bool is_result = value.kind == ValueKind::kResult;
  value.producer = static_cast<NodeId>(
      read_integer(fields["producer"], where.at("producer"), is_result ? 0 : kNoNode, is_result ? num_nodes - 1 : kNoNode));
  value.output_index = static_cast<int32_t>(read_integer(fields["output_index"], where.at("output_index"), 0, kMaxInt32));
  value.storage = static_cast<int32_t>(read_integer(fields["storage"], where.at("storage"), -1, num_values - 1));
  value.is_wrapped_number = read_bool(fields["is_wrapped_number"], where.at("is_wrapped_number"));
  fields.expect_no_more();
  check_geometry(value.spec, where);
  return value;
}

Node read_node(const json::value& json, const Where& where, int32_t num_values) {
  Fields fields(json, where);
  Node node;
  node.op = read_string(fields["op"], where.at("op"));
  node.overload = read_string(fields["overload"], where.at("overload"));
  const Where arguments = where.at("arguments");
  for (const json::value& argument : read_array(fields["arguments"], arguments)) {
    node.arguments.push_back(read_argument(argument, arguments.at(node.arguments.size()), num_values));
  }
  node.outputs = read_ids(fields["outputs"], where.at("outputs"), kNoValue, num_values - 1);
  node.written_storages = read_ids(fields["written_storages"], where.at("written_storages"), 0, num_values - 1);
  node.grad_enabled = read_bool(fields["grad_enabled"], where.at("grad_enabled"));
  node.autocast.enabled = read_bool(fields["autocast"], where.at("autocast"));
  node.autocast.dtype = read_dtype(fields["autocast_dtype"], where.at("autocast_dtype"));
  node.random_ordinal =
      static_cast<int32_t>(read_integer(fields["random_ordinal"], where.at("random_ordinal"), -1, kMaxInt32));
  node.recompute_region =
      static_cast<int32_t>(read_integer(fields["recompute_region"], where.at("recompute_region"), -1, kMaxInt32));
  node.module = read_string(fields["module"], where.at("module"));
  fields.expect_no_more();
  return node;
}

/// A result is made before it is read.
void check_order(const Graph& graph, const Where& root) {
  const Where nodes = root.at("nodes");
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (ValueId id : node_inputs(graph.nodes[i])) {
      const Value& value = graph.values[id];
      if (value.kind == ValueKind::kResult && value.producer >= static_cast<NodeId>(i)) {
        const Where node = nodes.at(i);
        refuse(node.at("arguments"), "values made before",
               std::string("%").append(std::to_string(id)).append(" of node ").append(std::to_string(value.producer)));
      }
    }
  }
}

/// What a node makes says so.
void check_outputs(const Graph& graph, const Where& root) {
  const Where nodes = root.at("nodes");
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Where node = nodes.at(n), outputs = node.at("outputs");
    for (size_t i = 0; i < graph.nodes[n].outputs.size(); ++i) {
      const ValueId id = graph.nodes[n].outputs[i];
      if (id == kNoValue) continue;
      const Value& value = graph.values[id];
      const bool is_made_here = value.producer == static_cast<NodeId>(n) && value.output_index == static_cast<int32_t>(i);
      if (!is_made_here) {
        refuse(outputs.at(i), "a result of this node, at this place among its outputs",
               std::string("%").append(std::to_string(id)));
      }
    }
  }
}

int32_t count(const json::value& value, const Where& where) {
  const size_t size = read_array(value, where).size();
  if (size > static_cast<size_t>(kMaxInt32)) {
    refuse(where, "fewer than 2^31 elements", std::to_string(size));
  }
  return static_cast<int32_t>(size);
}

}  // namespace

std::string serialise(const Graph& graph) {
  json::monotonic_resource memory;
  const json::storage_ptr storage(&memory);
  json::array values(storage), nodes(storage);
  values.reserve(graph.values.size());
  nodes.reserve(graph.nodes.size());
  for (const Value& value : graph.values) values.push_back(write_value(value, storage));
  for (const Node& node : graph.nodes) nodes.push_back(write_node(node, storage));
  return json::serialize(json::value({{"format", kFormatVersion},
                                      {"key", graph.key},
                                      {"inputs", array_of(graph.inputs, storage)},
                                      {"returned", array_of(graph.returned, storage)},
                                      {"read", array_of(graph.read, storage)},
                                      {"backward_roots", array_of(graph.backward_roots, storage)},
                                      {"values", std::move(values)},
                                      {"nodes", std::move(nodes)}},
                                     storage));
}

Graph deserialise_graph(std::string_view text) {
  json::monotonic_resource memory;
  const Where root{.field = "graph"};
  const json::value document = parse(text, root, kMaxGraphDepth, &memory);
  Fields fields(document, root);
  read_integer(fields["format"], root.at("format"), kFormatVersion, kFormatVersion);
  const Where values = root.at("values");
  const Where nodes = root.at("nodes");
  const int32_t num_values = count(fields["values"], values);
  const int32_t num_nodes = count(fields["nodes"], nodes);
  Graph graph;
  graph.key = read_string(fields["key"], root.at("key"));
  graph.inputs = read_ids(fields["inputs"], root.at("inputs"), 0, num_values - 1);
  graph.returned = read_ids(fields["returned"], root.at("returned"), 0, num_values - 1);
  graph.read = read_ids(fields["read"], root.at("read"), 0, num_values - 1);
  graph.backward_roots = read_ids(fields["backward_roots"], root.at("backward_roots"), 0, num_values - 1);
  fields.expect_no_more();
  for (const json::value& value : document.at("values").get_array()) {
    graph.values.push_back(read_value(value, values.at(graph.values.size()), num_nodes, num_values));
  }
  for (const json::value& node : document.at("nodes").get_array()) {
    graph.nodes.push_back(read_node(node, nodes.at(graph.nodes.size()), num_values));
  }
  check_outputs(graph, root);
  check_order(graph, root);
  return graph;
}

uint64_t hash(std::string_view bytes) {
  uint64_t state = 0xCBF29CE484222325u;
  for (const char byte : bytes) {
    state = (state ^ static_cast<unsigned char>(byte)) * 0x100000001B3u;
  }
  return state;
}

uint64_t hash(const Graph& graph) { return hash(serialise(graph)); }

}  // namespace smp::partitioner
