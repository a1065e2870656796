// Prepares and runs flat lists of operators.
#include "runtime/stage/replay.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "runtime/capture/arguments.h"
#include "runtime/capture/opaque.h"
#include "runtime/capture/operator_info.h"
#include "runtime/capture/places.h"
#include "runtime/device/device.h"
#include "runtime/libtorch/boxed_tensors.h"
#include "runtime/stage/lifetimes.h"
#include "runtime/stage/paced_progress.h"

namespace smp::runtime {

using namespace partitioner;

std::string describe_operator(const std::string& op, const std::string& module) {
  return op + (module.empty() ? "" : " of module '" + module + "'");
}

std::string describe_run(const std::string& op, const std::string& module, int microbatch) {
  return describe_operator(op, module) + ", microbatch " + std::to_string(microbatch);
}

namespace {

at::Tensor element_of(const c10::IValue& argument, int32_t element) {
  if (element < 0) return argument.toTensor();
  const auto k = static_cast<size_t>(element);
  return argument.isTensorList() ? argument.toTensorList().get(k) : argument.toOptionalTensorList().get(k).value();
}

bool requires_grad(const c10::IValue& argument) {
  bool does = false;
  for_each_tensor(argument, [&](int, const at::Tensor& tensor) { does = does || tensor.requires_grad(); });
  return does;
}

std::string overwritten_text(const Graph& graph, int32_t storage, const Node& reader, const Node& writer) {
  const auto named = std::find_if(graph.values.begin(), graph.values.end(),
                                  [storage](const Value& value) { return is_named(value) && value.storage == storage; });
  const auto of = [](const Node& node) { return describe_operator(node.op, node.module); };
  return "expected '" + named->name + "' to stay as " + of(reader) + " has found it until the backward, got " + of(writer) +
         " in the same forward, which writes to it. Write to it before it is used or after the step, or let the forward use "
         "a clone() of it.";
}

}  // namespace

Replay::Replay(const Graph& graph, const std::vector<NodeId>& nodes, const std::vector<ValueId>& kept)
    : slot_of_value_(graph.values.size(), -1) {
  find_writes(graph, nodes);
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
  plan_frees(kept);
}

int Replay::assign_slot(ValueId value) {
  auto& slot = slot_of_value_[value];
  if (slot < 0) slot = static_cast<int32_t>(num_slots_++);
  return slot;
}

// Of parameters and buffers; all that touches one that is written shares a stage. One that its schema does not declare,
// autograd does not notice.
void Replay::find_writes(const Graph& graph, const std::vector<NodeId>& nodes) {
  std::unordered_set<int32_t> own;
  for (const Value& value : graph.values) {
    if (is_named(value)) own.insert(value.storage);
  }
  for (NodeId n : nodes) {
    const Node& node = graph.nodes[n];
    if (node.written_storages.empty()) continue;
    const OperatorInfo& info =
        operator_info(c10::Dispatcher::singleton().findSchemaOrThrow(node.op.c_str(), node.overload.c_str()));
    const auto& hidden = info.write_is_hidden;
    const bool is_noticed = std::find(hidden.begin(), hidden.end(), true) == hidden.end();
    for (int32_t storage : node.written_storages) {
      if (!own.contains(storage)) continue;
      NodeId& last = last_noticed_write_.emplace(storage, kNoNode).first->second;
      if (is_noticed) last = n;
    }
  }
}

// Unless the operator writes to it itself, or returns a view of it.
void Replay::keep_if_written(const Graph& graph, NodeId n, Kept place, ValueId id, Call& call) const {
  const Node& node = graph.nodes[n];
  const int32_t storage = graph.values[id].storage;
  const auto write = last_noticed_write_.find(storage);
  if (write == last_noticed_write_.end() || !node.grad_enabled || writes(operator_info(call.op), node, place.position))
    return;
  const bool is_alias = std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId output) {
    return output != kNoValue && graph.values[output].storage == storage;
  });
  if (is_alias) return;
  if (write->second > n) place.overwritten = overwritten_text(graph, storage, node, graph.nodes[write->second]);
  call.kept.push_back(std::move(place));
}

void Replay::prepare(const Graph& graph, NodeId n) {
  const Node& node = graph.nodes[n];
  Call call{{.op = c10::Dispatcher::singleton().findSchemaOrThrow(node.op.c_str(), node.overload.c_str())}};
  call.grad_enabled = node.grad_enabled;
  call.autocast = node.autocast;
  call.node = n;
  call.module = node.module;
  const size_t num_arguments = call.op.schema().arguments().size();
  TORCH_CHECK_VALUE(node.arguments.size() == num_arguments, "replay: expected ", num_arguments, " arguments of ", node.op,
                    ", got ", node.arguments.size(), ".");
  const OperatorInfo& info = operator_info(call.op);
  if (draws(info, node)) call.random_ordinal = node.random_ordinal;
  has_random_ = has_random_ || call.random_ordinal >= 0;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const Argument& argument = node.arguments[i];
    const auto position = static_cast<uint32_t>(i);
    if (const auto* ref = std::get_if<ValueRef>(&argument)) {
      call.tensors.push_back({position, slot_of_value_[ref->id]});
      call.arguments.emplace_back();
      keep_if_written(graph, n, {.position = position}, ref->id, call);
    } else if (const auto* refs = std::get_if<ValueRefList>(&argument)) {
      FlatCall::ListArgument list{.position = position, .slots = {}, .optional_elements = refs->optional_elements};
      for (ValueId id : refs->ids) {
        if (id != kNoValue) keep_if_written(graph, n, {position, static_cast<int32_t>(list.slots.size())}, id, call);
        list.slots.push_back(id == kNoValue ? -1 : slot_of_value_[id]);
      }
      call.lists.push_back(std::move(list));
      call.arguments.emplace_back();
    } else {
      call.arguments.push_back(to_ivalue(argument, nullptr, c10::Device(this_ranks_device().type)));
      call.copies_lists = call.copies_lists || call.arguments.back().isList();
    }
  }
  for (ValueId id : node.outputs) {
    call.outputs.push_back(id == kNoValue ? -1 : slot_of_value_[id]);
    call.made.push_back(id == kNoValue ? TensorSpec{} : graph.values[id].spec);
  }
  calls_.push_back(std::move(call));
}

void Replay::plan_frees(const std::vector<ValueId>& kept) {
  std::vector<bool> is_kept(num_slots_, false);
  for (ValueId id : kept) is_kept[slot_of_value_[id]] = true;
  Lifetimes lifetimes(num_slots_, calls_);
  for (size_t n = 0; n < calls_.size(); ++n) {
    std::erase_if(lifetimes.ends[n], [&](int32_t slot) { return is_kept[slot]; });
    calls_[n].freed = std::move(lifetimes.ends[n]);
  }
}

void Replay::push_arguments(const Call& call, const Slots& slots, const MicrobatchContext& context, size_t& next_override) {
  const size_t first = call.push(stack_, slots);
  for (; next_override < context.scalars.size() && context.scalars[next_override].node <= call.node; ++next_override) {
    const ScalarOverride& changed = context.scalars[next_override];
    if (changed.node != call.node) continue;
    TORCH_CHECK_VALUE(static_cast<size_t>(changed.argument) < call.arguments.size(), "replay: expected one of the ",
                      call.arguments.size(), " arguments of ", call.op.operator_name(), ", got number ", changed.argument,
                      ".");
    stack_[first + static_cast<size_t>(changed.argument)] =
        to_ivalue(changed.value, nullptr, c10::Device(this_ranks_device().type));
  }
}

// Copies the next microbatch cannot write to. The saved tensors of an operator without gradients hold nothing.
std::vector<Replay::Copy> Replay::give_copies(const Call& call, StageWatcher* watcher) {
  std::vector<Copy> copies;
  const size_t first = stack_.size() - call.arguments.size();
  const bool has_gradient = std::any_of(stack_.begin() + static_cast<ptrdiff_t>(first), stack_.end(), requires_grad);
  for (size_t k = 0; has_gradient && k < call.kept.size(); ++k) {
    c10::IValue& argument = stack_[first + call.kept[k].position];
    static const auto clone = c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", "");
    torch::jit::Stack copy{element_of(argument, call.kept[k].element), c10::IValue()};
    watcher == nullptr ? clone.callBoxed(copy) : watcher->call_operator(clone, copy, call.node, -1);
    const at::Tensor tensor = std::move(copy.front()).toTensor();
    copies.push_back({tensor.storage().getWeakStorageImpl(), tensor.unsafeGetTensorImpl()->version_counter()});
    put_tensor(argument, call.kept[k].element, tensor);
  }
  return copies;
}

// A copy that is gone was not saved, and is not made again.
void Replay::note_saved(Call& call, std::vector<Copy> copies) {
  std::vector<Kept> saved;
  for (size_t k = 0; k < copies.size(); ++k) {
    if (copies[k].memory.expired()) continue;
    if (!call.kept[k].overwritten.empty()) overwritten_.emplace_back(std::move(copies[k]), call.kept[k].overwritten);
    saved.push_back(std::move(call.kept[k]));
  }
  if (!copies.empty()) call.kept = std::move(saved);
}

// What this microbatch has written itself LibTorch finds in its backward, as if there were no copy.
std::string Replay::mark_overwritten() {
  std::string text;
  for (auto& [copy, overwritten] : overwritten_) {
    if (copy.memory.expired()) continue;
    copy.version.bump();
    if (text.find(overwritten) == std::string::npos) text += (text.empty() ? "" : " ") + overwritten;
  }
  overwritten_.clear();
  return text;
}

void Replay::call_operator(const Call& call, const MicrobatchContext& context, StageWatcher* watcher) {
  std::shared_ptr<void> interpreter;
  std::optional<GeneratorHold> seed;
  if (call.random_ordinal >= 0) {
    interpreter = interpreter_for(call.op, stack_);  // first: who holds it may wait for the generator
    seed.emplace(context.random, static_cast<uint64_t>(call.random_ordinal), draws_of(call.op, stack_));
  }
  watcher == nullptr ? call.op.callBoxed(stack_) : watcher->call_operator(call.op, stack_, call.node, call.random_ordinal);
}

// Everything behind an operator was recorded with the results that its meta kernel gave: an operator whose sizes depend on
// its data, and says nothing of it, would be computed with those of zeros. A function of smp::opaque may return another
// number of them as well.
void Replay::check_results(const Call& call) const {
  size_t num_results = 0;
  const auto check = [&](const at::Tensor& result) {
    const size_t k = num_results++;
    if (k >= call.outputs.size() || call.outputs[k] < 0 || !result.defined()) return;
    const TensorSpec& expected = call.made[k];
    TORCH_CHECK(result.sizes() == expected.sizes && result.scalar_type() == expected.dtype, "expected sizes ",
                at::IntArrayRef(expected.sizes), " and ", expected.dtype, " as recorded without data, got ", result.sizes(),
                " and ", result.scalar_type(),
                ". Call what depends on data through smp::opaque, with the sizes that it promises.");
    if (expected.requires_grad || !result.requires_grad()) return;
    TORCH_CHECK(
        call.op.operator_name().name.starts_with("aten::"),
        "expected a result that needs no gradient, as it was recorded, got one that does: the function's first call is "
        "on zeros, and its gradient would be lost. Let what it returns for zeros depend on its inputs too "
        "(x.sum() * 0 in place of a constant).");
  };
  for (const c10::IValue& result : stack_) {
    if (result.isTensor()) {
      check(result.toTensor());
    } else {
      for (const at::Tensor& tensor : result.toTensorVector()) check(tensor);
    }
  }
  TORCH_CHECK(num_results == call.outputs.size(), "expected ", call.outputs.size(),
              " results as recorded without data, got ", num_results,
              ". Call what depends on data through smp::opaque, with as many results as it gives for zeros.");
}

std::string Replay::run(Slots& slots, const MicrobatchContext& context, const std::function<void()>& progress,
                        StageWatcher* watcher) {
  PacedProgress paced(progress);
  stack_.clear();
  overwritten_.clear();
  size_t next_override = 0;
  const UncachedCasts uncached;
  const AmbientModes ambient;
  Autocast current = current_autocast();
  const Call* running = nullptr;
  try {
    for (size_t n = 0; n < calls_.size(); ++n) {
      Call& call = calls_[n];
      running = &call;
      if (call.grad_enabled != at::GradMode::is_enabled()) at::GradMode::set_enabled(call.grad_enabled);
      if (!(call.autocast == current)) {
        set_modes(call.grad_enabled, call.autocast);
        current = call.autocast;
      }
      push_arguments(call, slots, context, next_override);
      std::vector<Copy> copies;
      if (!call.kept.empty()) copies = give_copies(call, watcher);
      call_operator(call, context, watcher);
      check_results(call);
      call.store(stack_, slots);
      if (!copies.empty()) note_saved(call, std::move(copies));
      running = nullptr;
      paced();
    }
  } catch (c10::Error& error) {
    if (running != nullptr) {
      error.add_context("in " + describe_run(running->op.operator_name().name, running->module, context.microbatch));
    }
    throw;
  }
  return mark_overwritten();
}

}  // namespace smp::runtime
