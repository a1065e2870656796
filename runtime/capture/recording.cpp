// How a recording grows, and what its first operators say.
#include "runtime/capture/recording.h"

#include <algorithm>
#include <set>

#include "runtime/capture/places.h"

namespace smp::runtime {

using namespace partitioner;

ValueId Recording::add_value(Value value, ValueId before) {
  const ValueId id = next_value();
  same_impl.push_back(before == kNoValue ? id : same_impl[before]);
  graph.values.push_back(std::move(value));
  return id;
}

ValueId Recording::synthesise(const char* name, std::vector<Argument> arguments, TensorSpec spec, int32_t storage,
                              bool grad_enabled) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  Node node{.op = name, .overload = "", .arguments = std::move(arguments), .module = last_module};
  node.grad_enabled = grad_enabled;
  spec.requires_grad = false;
  const ValueId id = add_value({.spec = std::move(spec), .producer = next_node(), .storage = storage});
  node.outputs = {id};
  graph.nodes.push_back(std::move(node));
  calls.push_back({.op = op, .info = &operator_info(op), .synthesised = true});
  return id;
}

const std::string& Recording::module() const { return module_in_texts(graph, next_value(), last_module); }

std::string Recording::where() const { return describe_place("capture", module()); }

bool may_travel(const RecordedCall& call, size_t position, const Argument& value, const Argument& recorded) {
  const auto is_zero = [](const Argument& argument) {
    const auto* number = std::get_if<double>(&argument);
    return number != nullptr && *number == 0;
  };
  return call.info->argument_is_scalar[position] && !call.fixes_scalars && !call.info->scalars_set_geometry &&
         value.index() == recorded.index() && !std::holds_alternative<std::monostate>(value) &&
         !(call.info->zero_returns_argument && is_zero(value) != is_zero(recorded));
}

bool same_beginning(const Recording& a, const Recording& b, NodeId num_nodes) {
  const auto num_values = static_cast<ptrdiff_t>(values_of_prefix(a.graph, num_nodes));
  if (b.graph.nodes.size() < static_cast<size_t>(num_nodes) || b.graph.inputs != a.graph.inputs) return false;
  if (values_of_prefix(b.graph, num_nodes) != num_values) return false;
  if (!std::equal(a.graph.values.begin(), a.graph.values.begin() + num_values, b.graph.values.begin()) ||
      !std::equal(a.same_impl.begin(), a.same_impl.begin() + num_values, b.same_impl.begin())) {
    return false;
  }
  for (NodeId n = 0; n < num_nodes; ++n) {
    if (a.calls[n].synthesised != b.calls[n].synthesised) return false;
    if (a.calls[n].recompute_region != b.calls[n].recompute_region) return false;
  }
  return std::equal(a.graph.nodes.begin(), a.graph.nodes.begin() + num_nodes, b.graph.nodes.begin(),
                    [](const Node& x, const Node& y) {
                      return x.op == y.op && x.overload == y.overload && x.outputs == y.outputs &&
                             x.written_storages == y.written_storages && x.grad_enabled == y.grad_enabled &&
                             x.autocast == y.autocast && x.random_ordinal == y.random_ordinal;
                    });
}

ValueId kept_value(const Recording& recording, ValueId value, NodeId position) {
  const Graph& graph = recording.graph;
  const int32_t storage = graph.values[value].storage;
  // A matched run has gone past operators that nobody calls, which write nothing.
  while (position > 0 && recording.calls[static_cast<size_t>(position - 1)].synthesised) --position;
  for (auto n = static_cast<size_t>(position); n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (recording.calls[n].synthesised && node.op == "aten::clone" && std::get<ValueRef>(node.arguments[0]).id == value) {
      return node.outputs[0];
    }
    const auto& written = node.written_storages;
    if (std::find(written.begin(), written.end(), storage) != written.end()) return kNoValue;
  }
  return value;
}

ValueId values_of_prefix(const Graph& graph, NodeId num_nodes) {
  auto count = static_cast<ValueId>(graph.inputs.size());
  const auto note = [&count](const std::vector<ValueId>& ids) {
    for (ValueId id : ids) count = std::max(count, id + 1);
    return std::any_of(ids.begin(), ids.end(), [](ValueId id) { return id != kNoValue; });
  };
  for (NodeId n = num_nodes; n-- > 0;) {
    note(node_inputs(graph.nodes[n]));
    if (note(graph.nodes[n].outputs)) break;  // all earlier ones have smaller numbers
  }
  return count;
}

// A walk back over storages: a write to memory that is needed is needed too.
std::optional<std::vector<NodeId>> local_slice(const Graph& graph, NodeId num_nodes, const std::vector<ValueId>& values) {
  std::set<int32_t> needed;
  for (ValueId id : values) {
    if (is_named(graph.values[id])) return std::nullopt;
    needed.insert(graph.values[id].storage);
  }
  std::vector<NodeId> slice;
  for (NodeId n = num_nodes; n-- > 0;) {
    const Node& node = graph.nodes[n];
    bool is_needed = false;
    for (ValueId id : node.outputs) is_needed = is_needed || (id != kNoValue && needed.contains(graph.values[id].storage));
    for (int32_t storage : node.written_storages) is_needed = is_needed || needed.contains(storage);
    if (!is_needed) continue;
    if (node.random_ordinal >= 0) return std::nullopt;
    for (ValueId id : node_inputs(node)) {
      if (is_named(graph.values[id])) return std::nullopt;
      needed.insert(graph.values[id].storage);
    }
    slice.push_back(n);
  }
  return std::vector<NodeId>(slice.rbegin(), slice.rend());
}

}  // namespace smp::runtime
