// Prepares and runs flat lists of operators.
#include "runtime/stage/replay.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "runtime/capture/arguments.h"
#include "runtime/capture/operator_info.h"
#include "runtime/capture/places.h"
#include "runtime/stage/paced_progress.h"

namespace smp::runtime {

using namespace partitioner;

Replay::Replay(const Graph& graph, const std::vector<NodeId>& nodes, const std::vector<ValueId>& kept)
    : slot_of_value_(graph.values.size(), -1) {
  find_written_buffers(graph);
  std::vector<bool> made(graph.values.size(), false);
  for (NodeId n : nodes) {
    for (ValueId id : node_inputs(graph.nodes[n])) {
      if (!made[id] && slot_of_value_[id] < 0) external_.push_back(id);
      assign_slot(id);
    }
    for (ValueId id : graph.nodes[n].outputs) {
      if (id == kNoValue) continue;
      assign_slot(id);
      made[id] = true;
    }
    prepare(graph, n);
  }
  for (ValueId id : kept) {
    if (slot_of_value_[id] >= 0) continue;
    assign_slot(id);
    external_.push_back(id);  // passes through
  }
  std::sort(external_.begin(), external_.end());
  plan_frees(graph, nodes, kept);
}

int Replay::assign_slot(ValueId value) {
  auto& slot = slot_of_value_[value];
  if (slot < 0) slot = static_cast<int32_t>(num_slots_++);
  return slot;
}

// Microbatches write to a buffer in turn, and the backward of one may come after the write of the next.
void Replay::find_written_buffers(const Graph& graph) {
  int32_t num_storages = 0;
  for (const Value& value : graph.values) num_storages = std::max(num_storages, value.storage + 1);
  std::vector<bool> is_buffer(static_cast<size_t>(num_storages));
  is_written_buffer_.resize(static_cast<size_t>(num_storages));
  for (const Value& value : graph.values) {
    if (value.kind == ValueKind::kBuffer && value.storage >= 0) is_buffer[static_cast<size_t>(value.storage)] = true;
  }
  for (const Node& node : graph.nodes) {
    for (int32_t storage : node.written_storages) {
      is_written_buffer_[static_cast<size_t>(storage)] = is_buffer[static_cast<size_t>(storage)];
    }
  }
}

void Replay::prepare(const Graph& graph, NodeId n) {
  const Node& node = graph.nodes[n];
  Call call{{.op = c10::Dispatcher::singleton().findSchemaOrThrow(node.op.c_str(), node.overload.c_str())}};
  call.grad_enabled = node.grad_enabled;
  call.autocast = node.autocast;
  call.node = n;
  call.module = node.module;
  const OperatorInfo& info = operator_info(call.op);
  if (draws(info, node)) call.random_ordinal = node.random_ordinal;
  has_random_ = has_random_ || call.random_ordinal >= 0;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const Argument& argument = node.arguments[i];
    const auto position = static_cast<uint32_t>(i);
    if (const auto* ref = std::get_if<ValueRef>(&argument)) {
      call.tensors.push_back({position, slot_of_value_[ref->id]});
      call.arguments.emplace_back();
      const int32_t storage = graph.values[ref->id].storage;
      const bool is_alias = std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId id) {
        return id != kNoValue && graph.values[id].storage == storage;
      });
      const bool is_written = storage >= 0 && is_written_buffer_[static_cast<size_t>(storage)];
      if (is_written && node.grad_enabled && !is_alias && !writes(info, node, i)) {
        call.kept.push_back(position);
      }
    } else if (const auto* refs = std::get_if<ValueRefList>(&argument)) {
      FlatCall::ListArgument list{.position = position, .slots = {}, .optional_elements = refs->optional_elements};
      for (ValueId id : refs->ids) list.slots.push_back(id == kNoValue ? -1 : slot_of_value_[id]);
      call.lists.push_back(std::move(list));
      call.arguments.emplace_back();
    } else {
      call.arguments.push_back(to_ivalue(argument, nullptr, c10::Device(c10::kCPU)));
      call.copies_lists = call.copies_lists || call.arguments.back().isList();
    }
  }
  for (ValueId id : node.outputs) call.outputs.push_back(id == kNoValue ? -1 : slot_of_value_[id]);
  calls_.push_back(std::move(call));
}

void Replay::plan_frees(const Graph& graph, const std::vector<NodeId>& nodes, const std::vector<ValueId>& kept) {
  std::vector<int> last_use(num_slots_, -1);
  for (size_t k = 0; k < nodes.size(); ++k) {
    for (ValueId id : node_inputs(graph.nodes[nodes[k]])) last_use[slot_of_value_[id]] = static_cast<int>(k);
    for (ValueId id : graph.nodes[nodes[k]].outputs) {
      if (id != kNoValue) last_use[slot_of_value_[id]] = static_cast<int>(k);
    }
  }
  for (ValueId id : kept) last_use[slot_of_value_[id]] = -1;
  for (size_t slot = 0; slot < last_use.size(); ++slot) {
    if (last_use[slot] >= 0) calls_[last_use[slot]].freed.push_back(static_cast<int32_t>(slot));
  }
}

void Replay::push_arguments(const Call& call, const Slots& slots, const MicrobatchContext& context,
                            size_t& next_override) {
  const size_t first = call.push(stack_, slots);
  for (; next_override < context.scalars.size() && context.scalars[next_override].node <= call.node; ++next_override) {
    const ArgumentOverride& changed = context.scalars[next_override];
    if (changed.node != call.node) continue;
    stack_[first + static_cast<size_t>(changed.argument)] =
        to_ivalue(changed.value, nullptr, c10::Device(c10::kCPU));
  }
}

// The saved tensors of an operator without gradients hold nothing, so its buffers are read where they are.
void Replay::keep_buffers(const Call& call, StageWatcher* watcher) {
  const size_t first = stack_.size() - call.arguments.size();
  const bool saves = std::any_of(call.tensors.begin(), call.tensors.end(), [&](const FlatCall::TensorArgument& argument) {
    const c10::IValue& value = stack_[first + argument.position];
    return value.isTensor() && value.toTensor().requires_grad();
  });
  if (!saves) return;
  for (uint32_t position : call.kept) {
    c10::IValue& value = stack_[first + position];
    if (value.toTensor().requires_grad()) continue;
    static const auto clone = c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", "");
    torch::jit::Stack copy{value, c10::IValue()};
    watcher == nullptr ? clone.callBoxed(copy) : watcher->call_operator(clone, copy, call.node, -1);
    value = std::move(copy.front());
  }
}

void Replay::call_operator(const Call& call, const MicrobatchContext& context, StageWatcher* watcher) {
  if (!call.kept.empty()) keep_buffers(call, watcher);
  std::optional<OperatorSeedGuard> seed;
  if (call.random_ordinal >= 0) {
    seed.emplace(operator_seed(context.random, static_cast<uint64_t>(call.random_ordinal)));
  }
  watcher == nullptr ? call.op.callBoxed(stack_) : watcher->call_operator(call.op, stack_, call.node, call.random_ordinal);
}

std::string Replay::place_of(const Call& call, const MicrobatchContext& context) {
  const std::string module = call.module.empty() ? "" : " of module '" + call.module + "'";
  return "in " + call.op.schema().operator_name().name + module + ", microbatch " + std::to_string(context.microbatch);
}

void Replay::run(Slots& slots, const MicrobatchContext& context, const std::function<void()>& progress,
                 StageWatcher* watcher) {
  PacedProgress paced(progress);
  stack_.clear();
  size_t next_override = 0;
  const UncachedCasts uncached;
  const bool grad_enabled = at::GradMode::is_enabled();
  const Autocast autocast = current_autocast();
  Autocast current = autocast;
  const Call* running = nullptr;
  try {
    for (size_t n = 0; n < calls_.size(); ++n) {
      const Call& call = calls_[n];
      running = &call;
      if (call.grad_enabled != at::GradMode::is_enabled()) at::GradMode::set_enabled(call.grad_enabled);
      if (!(call.autocast == current)) {
        set_modes(call.grad_enabled, call.autocast);
        current = call.autocast;
      }
      push_arguments(call, slots, context, next_override);
      call_operator(call, context, watcher);
      call.store(stack_, slots);
      running = nullptr;
      paced();
    }
  } catch (c10::Error& error) {
    set_modes(grad_enabled, autocast);
    if (running != nullptr) error.add_context(place_of(*running, context));
    throw;
  } catch (...) {
    set_modes(grad_enabled, autocast);
    throw;
  }
  set_modes(grad_enabled, autocast);
}

}  // namespace smp::runtime
