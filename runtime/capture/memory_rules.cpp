// The rules, by operators read and written from the graph.
#include "runtime/capture/memory_rules.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "partitioner/graph/gradient_flow.h"
#include "partitioner/graph/operator_traits.h"
#include "runtime/capture/replaced_data.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

// The tensors of one argument; missing elements of a list left out.
std::vector<ValueId> values_in(const Argument& argument) {
  if (const auto* ref = std::get_if<ValueRef>(&argument)) return {ref->id};
  std::vector<ValueId> present;
  if (const auto* refs = std::get_if<ValueRefList>(&argument)) {
    for (ValueId id : refs->ids) {
      if (id != kNoValue) present.push_back(id);
    }
  }
  return present;
}

std::string describe(const Value& value) {
  return value.name.empty() ? c10::str("a tensor of sizes ", c10::IntArrayRef(value.spec.sizes)) : "'" + value.name + "'";
}

}  // namespace

void MemoryRules::check_reads(const OperatorInfo& info, const Node& node) const {
  for (size_t i = 0; i < node.arguments.size() && !replacements_.empty(); ++i) {
    for (ValueId id : values_in(node.arguments[i])) check_replaced(info.name, id, writes(info, node, i));
  }
  if (uninitialised_.empty() || info.reads_only_geometry) return;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (writes(info, node, i)) continue;
    for (ValueId id : values_in(node.arguments[i])) {
      const Value& value = recording_.graph.values[id];
      TORCH_CHECK(value.spec.num_elements() == 0 || !uninitialised_.contains(value.storage), recording_.where(), ": ",
                  info.name,
                  " reads the result of empty() before any operator has written it, so it was written through a raw "
                  "pointer, which cannot be captured. Fill it with operators, or build it outside of the step.");
    }
  }
}

void MemoryRules::check_writes(const OperatorInfo& info, Node& node) const {
  if (info.name == kSetData) check_replacement(node);
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (!info.argument_written[i]) continue;
    for (ValueId id : values_in(node.arguments[i])) {
      if (writes(info, node, i)) {
        check_write(info, id);
        if (!info.write_is_hidden[i]) check_backwards_before(info, id);
      } else if (!is_of_model(id)) {
        continue;  // statistics of a norm in evaluation
      }
      // Those of the model count as written all the same: they stay on one rank, for the training that follows.
      node.written_storages.push_back(recording_.graph.values[id].storage);
    }
  }
}

void MemoryRules::add(const OperatorInfo& info, const Node& node) {
  written_.insert(node.written_storages.begin(), node.written_storages.end());
  for (Replacement& each : replacements_) {
    each.is_written =
        each.is_written || std::count(node.written_storages.begin(), node.written_storages.end(), each.target) > 0;
  }
  if (info.name == kSetData) {
    const ValueId target = values_in(node.arguments[0]).front(), source = values_in(node.arguments[1]).front();
    const auto& values = recording_.graph.values;
    std::erase_if(replacements_, [&](const Replacement& each) { return each.target == values[target].storage; });
    replacements_.push_back({.first = recording_.same_impl[target],
                             .replaced = node.outputs.front(),
                             .target = values[target].storage,
                             .source = values[source].storage,
                             .node = values[node.outputs.front()].producer});
  }
  if (!info.makes_uninitialised) {
    for (int32_t storage : node.written_storages) uninitialised_.erase(storage);
    return;
  }
  for (ValueId id : node.outputs) {
    if (id != kNoValue) uninitialised_.insert(recording_.graph.values[id].storage);
  }
}

bool MemoryRules::is_of_model(ValueId id) const {
  const auto& values = recording_.graph.values;
  return std::any_of(values.begin(), values.end(),
                     [&](const Value& other) { return is_named(other) && other.storage == values[id].storage; });
}

void MemoryRules::check_write(const OperatorInfo& info, ValueId id) const {
  const Graph& graph = recording_.graph;
  const Value& value = graph.values[id];
  // A view that the body makes of a constant is a result, on the constant's memory.
  for (const Value& other : graph.values) {
    TORCH_CHECK(other.kind != ValueKind::kConstant || other.storage != value.storage, recording_.where(), ": ", info.name,
                " writes to a tensor of sizes ", c10::IntArrayRef(other.spec.sizes),
                " that is neither parameter, buffer nor argument of the step. The write would be lost on other ranks: "
                "register it with register_buffer before the model is wrapped.");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      std::none_of(graph.backward_roots.begin(), graph.backward_roots.end(),
                   [&](ValueId root) { return graph.values[root].storage == value.storage; }),
      recording_.where(), ": expected operators after backward() to leave the loss as it is, got ", info.name,
      ", which writes to it. The stages run the backward after all operators of the body and would start from what was "
      "written. Make a new tensor of it: loss / 4 for loss /= 4, loss.detach() for loss.detach_().");
}

// From here on a program without smp has one memory for both, and the stages two.
void MemoryRules::check_replacement(const Node& node) const {
  const auto& values = recording_.graph.values;
  const Value& target = values[values_in(node.arguments[0]).front()];
  const int32_t source = values[values_in(node.arguments[1]).front()].storage;
  const bool is_shared = std::any_of(values.begin(), values.end(), [&](const Value& other) {
    return other.storage == source && other.kind != ValueKind::kResult;
  });
  const bool is_given_twice = std::any_of(replacements_.begin(), replacements_.end(), [&](const Replacement& each) {
    return each.source == source && each.target != target.storage;
  });
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_shared && !is_given_twice, recording_.where(), ": expected the data of ", describe(target),
      " to be replaced (set_data, in Python .data = ) by a result of operators that nothing else keeps, got memory of ",
      is_shared ? "another parameter or buffer, an argument or a tensor made outside of the step" : "another tensor too",
      ", which it would share from now on. Give it a clone() of that.");
}

void MemoryRules::check_replaced(const std::string& user, ValueId value, bool is_written) const {
  for (const Replacement& each : replacements_) {
    const Value& used = recording_.graph.values[value];
    const int32_t storage = used.storage;
    // Of data() nobody can tell when it was taken.
    const bool may_be_old = value < each.replaced ||
                            (used.producer != kNoNode && recording_.calls[static_cast<size_t>(used.producer)].synthesised);
    const bool is_left_behind = storage == each.target && may_be_old && recording_.same_impl[value] != each.first;
    const bool is_shared = storage == each.source && (is_written || each.is_written);
    TORCH_CHECK_NOT_IMPLEMENTED(!is_left_behind && !is_shared, recording_.where(), ": expected the data of ",
                                describe(recording_.graph.values[each.first]),
                                ", which the body has replaced (set_data, in Python .data = ), to be "
                                "used by that name from then on, got ",
                                user, ", which uses ",
                                is_shared ? "what they were replaced by, after one of the two was written to"
                                          : "data() of it or an older view, which may be of what was there",
                                ". The stages copy. Use the tensor itself or its detach(), or write into it with copy_.");
  }
}

// What autograd would find of a parameter whose data were replaced depends on how it had been saved: as itself or a view.
void MemoryRules::check_saved_before_replacement(ValueId root, NodeId position) const {
  if (replacements_.empty()) return;
  for_saved(root, position, [&](NodeId reader, ValueId id) {
    const Value& value = recording_.graph.values[id];
    for (const Replacement& each : replacements_) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          value.storage != each.target || reader >= each.node || !recording_.graph.nodes[reader].grad_enabled,
          recording_.where(), ": expected the data of ", describe(recording_.graph.values[each.first]),
          " to be replaced (set_data, in Python .data = ) before an operator of the same backward uses them, got ",
          recording_.calls[reader].info->name,
          " earlier in the body. Give them other data before that, or let it use a clone().");
    }
  });
}

// The stages run the backwards after all operators of the body.
void MemoryRules::check_backwards_before(const OperatorInfo& info, ValueId id) const {
  const Graph& graph = recording_.graph;
  const Value& value = graph.values[id];
  for (size_t k = 0; k < graph.backward_roots.size(); ++k) {
    TORCH_CHECK_NOT_IMPLEMENTED(!may_have_saved(graph.backward_roots[k], backward_positions_[k], value.storage),
                                recording_.where(),
                                ": expected operators after backward() to leave alone what the backward needs, got ",
                                info.name, ", which writes to ", describe(value),
                                ". The stages run the backward after all operators of the body. Make a new tensor (x = x + "
                                "1 for x += 1), let the forward use a clone() of it, or write to it after the step.");
  }
}

// Autograd does not notice these writes: a plain loop's backward would take the new content of what it has saved, in
// silence.
void MemoryRules::check_backward(ValueId root, NodeId position) const {
  check_saved_before_replacement(root, position);
  const Graph& graph = recording_.graph;
  std::unordered_map<int32_t, NodeId> last_write;  // by storage
  for (NodeId n = 0; n < position; ++n) {
    for (int32_t storage : hidden_writes(n)) last_write[storage] = n;
  }
  if (last_write.empty()) return;
  for_saved(root, position, [&](NodeId reader, ValueId id) {
    const Value& value = graph.values[id];
    const auto write = last_write.find(value.storage);
    if (write == last_write.end() || write->second <= reader || hidden_writes(reader).contains(value.storage)) return;
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, recording_.where(), ": expected ", describe(value), " to stay as ", recording_.calls[reader].info->name,
        " has found it until the backward, got ", recording_.calls[write->second].info->name,
        " in between, which writes to it without autograd's notice: the gradients of LibTorch would be those of other "
        "numbers than the forward's. Call the module in training mode first, or call backward() before it.");
  });
}

// The running statistics of a norm in training mode; its own backward does not look at them.
std::unordered_set<int32_t> MemoryRules::hidden_writes(NodeId n) const {
  const OperatorInfo& info = *recording_.calls[n].info;
  const Node& node = recording_.graph.nodes[n];
  std::unordered_set<int32_t> storages;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (!info.write_is_hidden[i] || !writes(info, node, i)) continue;
    for (ValueId id : values_in(node.arguments[i])) storages.insert(recording_.graph.values[id].storage);
  }
  return storages;
}

bool MemoryRules::may_have_saved(ValueId root, NodeId position, int32_t storage) const {
  bool found = false;
  for_saved(root, position, [&](NodeId, ValueId id) { found = found || recording_.graph.values[id].storage == storage; });
  return found;
}

// What operators that the backward from `root` passes through read or make and may have saved, last ones first.
void MemoryRules::for_saved(ValueId root, NodeId position, const std::function<void(NodeId, ValueId)>& use) const {
  const Graph& graph = recording_.graph;
  const GradientFlow flow(graph, {root});
  for (NodeId n = position; n-- > 0;) {
    const Node& node = graph.nodes[n];
    const bool saves = !has(Trait::kSavesNothing, node.op) && !recording_.calls[n].info->reads_only_geometry;
    if (!saves || !flow.passes_gradient(n)) continue;
    for (ValueId id : node_inputs(node)) use(n, id);
    for (ValueId id : node.outputs) {
      if (id != kNoValue) use(n, id);
    }
  }
}

}  // namespace smp::runtime
