// Compares a run with its recording, call by call.
#include "runtime/capture/matcher.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "partitioner/graph/graph_io.h"
#include "runtime/capture/arguments.h"
#include "runtime/capture/history.h"
#include "runtime/capture/places.h"
#include "runtime/capture/recompute_regions.h"

namespace smp::runtime {

using namespace partitioner;

std::vector<at::Tensor> Matcher::start(std::shared_ptr<Recording> recording, const GhostRun& ghosts) {
  at_.recording = std::move(recording);
  at_.run.recording = at_.recording;
  at_.storages = at_.recording->storages;
  ghost_run_ = ghosts;
  ghosts_.assign(at_.recording->graph.values.size(), weak(at::Tensor()));
  std::vector<at::Tensor> inputs;
  inputs.reserve(at_.recording->graph.inputs.size());
  for (ValueId id : at_.recording->graph.inputs) inputs.push_back(hand_out(id));
  at_.skip_synthesised();
  return inputs;
}

void Matcher::reset() noexcept {
  at_ = {};
  ghosts_.clear();
  written_.clear();
  copies_.clear();
}

Matcher::Marks Matcher::marks() const {
  return {at_.run.scalars.size(), at_.run.constants.size(), at_.used.size(), copies_.size()};
}

void Matcher::go_back_to(const Marks& before) {
  at_.run.scalars.resize(before.scalars);
  at_.run.constants.resize(before.constants);
  at_.used.resize(before.used);
  for (; copies_.size() > before.copies; copies_.pop_back()) {
    Ghost& copy = *as_ghost(copies_.back());
    ghosts_[static_cast<size_t>(std::exchange(copy.value, kNoValue))] = weak(at::Tensor());
  }
}

template <class Matches>
bool Matcher::keeps_if(const Matches& matches) {
  const Marks before = marks();
  try {
    if (matches()) return true;
  } catch (...) {
    go_back_to(before);
    throw;
  }
  go_back_to(before);
  return false;
}

bool Matcher::matches_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto n = static_cast<size_t>(at_.position);
  if (n >= at_.recording->calls.size() || !(at_.recording->calls[n].op == op)) return false;
  const Node& node = at_.recording->graph.nodes[n];
  if (node.grad_enabled != at::GradMode::is_enabled() || !(node.autocast == current_autocast())) return false;
  if (at_.recording->calls[n].recompute_region != current_recompute_region()) return false;
  const size_t first = stack.size() - node.arguments.size();
  return keeps_if([&] {
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      if (!matches_argument(stack[first + i], node.arguments[i], static_cast<int32_t>(i))) return false;
    }
    return true;
  });
}

bool Matcher::matches_argument(const c10::IValue& actual, const Argument& recorded, int32_t position) {
  if (const auto* ref = std::get_if<ValueRef>(&recorded)) {
    return actual.isTensor() && matches_tensor(actual.toTensor(), ref->id);
  }
  if (const auto* number = std::get_if<int64_t>(&recorded)) {
    if (actual.isInt() && actual.toInt() == *number) return true;
  } else if (std::holds_alternative<std::monostate>(recorded)) {
    return actual.isNone();
  } else if (const auto* flag = std::get_if<bool>(&recorded)) {
    if (actual.isBool() && actual.toBool() == *flag) return true;
  } else if (const auto* refs = std::get_if<ValueRefList>(&recorded)) {
    if (refs->optional_elements ? !actual.isOptionalTensorList() : !actual.isTensorList()) return false;
    const auto elements = actual.toListRef();
    if (elements.size() != refs->ids.size()) return false;
    for (size_t i = 0; i < elements.size(); ++i) {
      const bool present = elements[i].isTensor() && elements[i].toTensor().defined();
      if (present != (refs->ids[i] != kNoValue)) return false;
      if (present && !matches_tensor(elements[i].toTensor(), refs->ids[i])) return false;
    }
    return true;
  }
  if (actual.isTensor() || actual.isTensorList() || actual.isOptionalTensorList()) {
    return std::holds_alternative<UndefinedTensor>(recorded) && actual.isTensor() && !actual.toTensor().defined();
  }
  const RecordedCall& call = at_.recording->calls[static_cast<size_t>(at_.position)];
  Argument value = to_argument(actual, nullptr, call.info->name);
  if (same_argument(value, recorded)) return true;
  // Another number of the same type leaves the geometry alone: the graph stays, the number travels.
  const bool may_change = !actual.isNone() && may_travel(call, static_cast<size_t>(position), value, recorded);
  if (may_change) at_.run.scalars.push_back({at_.position, position, std::move(value)});
  return may_change;
}

bool Matcher::matches_tensor(const at::Tensor& actual, ValueId recorded) {
  const ValueId first = at_.recording->same_impl[recorded];
  if (Ghost* ghost = as_ghost(actual)) {
    if (ghost->value == kNoValue) return matches_copy(actual, *ghost, recorded);
    return ghost->value == first && ghost->run == ghost_run_.number && is_as_handed_out(actual);
  }
  const Value& value = at_.recording->graph.values[recorded];
  if (value.kind == ValueKind::kConstant) return matches_constant(actual, recorded);
  if (!actual.defined()) return false;
  if (actual.is_same(at_.recording->tensors[first])) {
    // A parameter may have been frozen, or have got data of another type, since it was recorded.
    return !is_named(value) || (actual.requires_grad() == value.spec.requires_grad && same_geometry(actual, value.spec));
  }
  // An alias of a parameter or buffer, made behind the dispatcher.
  if (value.kind != ValueKind::kResult || actual.requires_grad() || value.spec.requires_grad ||
      !same_geometry(actual, value.spec)) {
    return false;
  }
  const NamedTensor* base = bindings_.find_storage(actual);
  if (base == nullptr || bindings_.find(actual) != nullptr) return false;
  const auto& values = at_.recording->graph.values;
  return std::any_of(values.begin(), values.end(), [&](const Value& other) {
    return other.storage == value.storage && other.kind == base->kind && other.name == base->name;
  });
}

// A copy made behind the dispatcher lives on the same storage and has no gradient. From its first use on it is the ghost of
// the alias that the recording has for it.
bool Matcher::matches_copy(const at::Tensor& actual, Ghost& ghost, ValueId recorded) {
  const Value& value = at_.recording->graph.values[recorded];
  const bool is_alias = value.producer != kNoNode && at_.recording->calls[static_cast<size_t>(value.producer)].synthesised;
  if (ghost.run != ghost_run_.number || !is_alias || actual.requires_grad() || !same_geometry(actual, value.spec) ||
      storage_of(actual) != at_.storages[static_cast<size_t>(value.storage)].unsafeGetStorageImpl()) {
    return false;
  }
  ghost.value = recorded;
  ghosts_[static_cast<size_t>(recorded)] = weak(actual);
  copies_.push_back(actual);
  return true;
}

bool Matcher::matches_constant(const at::Tensor& actual, ValueId recorded) {
  if (actual.requires_grad() && at::GradMode::is_enabled()) return false;
  const auto with_value = [recorded](const ConstantTensor& constant) { return constant.value == recorded; };
  const auto used = std::find_if(at_.used.begin(), at_.used.end(), with_value);
  if (used != at_.used.end()) {
    return (actual.is_same(used->tensor) && owns_memory(actual)) || same_content(actual, used->content);
  }
  const Value& value = at_.recording->graph.values[recorded];
  if (!actual.defined() || !can_be_constant(actual) || bindings_.find_storage(actual) != nullptr ||
      actual.unsafeGetTensorImpl()->is_wrapped_number() != value.is_wrapped_number) {
    return false;
  }
  const auto constant = std::find_if(at_.recording->constants.begin(), at_.recording->constants.end(), with_value);
  if (same_content(actual, constant->content)) {
    at_.used.push_back({recorded, actual, constant->content, actual.requires_grad()});
    return true;
  }
  if (actual.scalar_type() != value.spec.dtype || !actual.sizes().equals(value.spec.sizes) ||
      actual.device() != constant->content.device()) {
    return false;
  }
  at::Tensor content = snapshot_of(actual);
  if (!same_geometry(content, value.spec)) return false;
  at_.run.constants.push_back({recorded, content});
  at_.used.push_back({recorded, actual, std::move(content), actual.requires_grad()});
  return true;
}

// The stages run the backwards after every operator of the body, so the recorded root is this loss only if nothing
// writes to its memory from here on.
bool Matcher::matches_root(const at::Tensor& loss, size_t number) {
  const Graph& graph = at_.recording->graph;
  if (number >= graph.backward_roots.size()) return false;
  const ValueId root = graph.backward_roots[number];
  const int32_t storage = graph.values[root].storage;
  const bool is_written = std::any_of(graph.nodes.begin() + at_.position, graph.nodes.end(), [storage](const Node& node) {
    const auto& written = node.written_storages;
    return std::find(written.begin(), written.end(), storage) != written.end();
  });
  return !is_written && keeps_if([&] { return matches_tensor(loss, root); });
}

bool Matcher::matches_end(const std::vector<at::Tensor>& returned, size_t num_roots) {
  const Graph& graph = at_.recording->graph;
  if (static_cast<size_t>(at_.position) != graph.nodes.size()) return false;
  if (num_roots != graph.backward_roots.size() || returned.size() != graph.returned.size()) return false;
  return keeps_if([&] {
    for (size_t i = 0; i < returned.size(); ++i) {
      if (!returned[i].defined() || !matches_tensor(returned[i], graph.returned[i])) return false;
    }
    return true;
  });
}

void Matcher::answer(torch::jit::Stack& stack) {
  const auto n = static_cast<size_t>(at_.position);
  const RecordedCall& call = at_.recording->calls[n];
  const Node& node = at_.recording->graph.nodes[n];
  const size_t first = stack.size() - node.arguments.size();
  const auto& returned_argument = call.info->returned_argument;
  const auto result_of = [&](size_t k) {
    const int argument = returned_argument[k];
    return argument >= 0 ? stack[first + static_cast<size_t>(argument)] : c10::IValue(hand_out(node.outputs[k]));
  };
  if (!node.written_storages.empty()) follow_writes(call, stack);
  if (returned_argument.size() == 1) {
    c10::IValue result;
    if (call.returns_list && returned_argument[0] < 0) {
      c10::List<at::Tensor> list;
      for (ValueId id : node.outputs) list.push_back(hand_out(id));
      result = std::move(list);
    } else {
      result = result_of(0);
    }
    torch::jit::drop(stack, node.arguments.size());
    stack.push_back(std::move(result));
  } else {
    std::vector<c10::IValue> results;
    for (size_t k = 0; k < returned_argument.size(); ++k) results.push_back(result_of(k));
    torch::jit::drop(stack, node.arguments.size());
    for (auto& result : results) stack.push_back(std::move(result));
  }
  ++at_.position;
  at_.skip_synthesised();
}

// Fresh in every run, so that one which somebody keeps beyond its run is known by the run's number. An operator that has
// nothing to do (dropout for p = 0) gives back a ghost that it was given.
at::Tensor Matcher::hand_out(ValueId id) {
  if (id == kNoValue) return {};
  const auto first = static_cast<size_t>(at_.recording->same_impl[id]);
  if (static_cast<size_t>(id) != first) return lock(ghosts_[first]);
  const Value& value = at_.recording->graph.values[id];
  at::Tensor ghost = make_ghost(value.spec, at_.storages[static_cast<size_t>(value.storage)], ghost_run_, id);
  if (const auto signs = at_.recording->signs.find(id); signs != at_.recording->signs.end()) set_signs(ghost, signs->second);
  ghosts_[first] = weak(ghost);
  return ghost;
}

// What an in-place operator does to ghosts: to the geometry of its own, and to the gradient of all on the memory.
void Matcher::follow_writes(const RecordedCall& call, const torch::jit::Stack& stack) {
  const Node& node = at_.recording->graph.nodes[static_cast<size_t>(at_.position)];
  const auto* arguments = &stack.end()[-call.info->num_arguments];
  for (size_t i = 0; i < call.info->argument_written.size(); ++i) {
    if (!call.info->argument_written[i] || !arguments[i].isTensor() || as_ghost(arguments[i].toTensor()) == nullptr)
      continue;
    const at::Tensor& written = written_.emplace_back(arguments[i].toTensor());
    const auto& returned = call.info->returned_argument;
    const auto result = std::find(returned.begin(), returned.end(), static_cast<int>(i));
    if (result == returned.end()) continue;
    const TensorSpec& spec = at_.recording->graph.values[node.outputs[static_cast<size_t>(result - returned.begin())]].spec;
    if (!same_geometry(written, spec)) {  // t_(), and out= that makes room
      written.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides, spec.storage_offset);
    }
  }
  for (const GradientChange& change : call.gradients) {
    const at::Tensor ghost = lock(ghosts_[static_cast<size_t>(change.first)]);
    if (!ghost.defined()) continue;
    if (!is_as_handed_out(ghost)) refuse_history(ghost, describe_place("capture", at_.module()));
    set_gradient(ghost, change.requires_grad, ghost_run_);
  }
}

// Of what a matched run has handed out, and of the parameters, buffers and constants that it has used.
void Matcher::check_histories() const {
  const std::string place = describe_place("capture", at_.module());
  for (const WeakTensor& each : ghosts_) {
    const at::Tensor ghost = lock(each);
    if (ghost.defined() && !is_as_handed_out(ghost)) refuse_history(ghost, place);
  }
  for (const at::Tensor& named : at_.recording->tensors) {
    if (named.defined() && named.grad_fn() != nullptr) refuse_custom_function(named, place);
  }
  for (const ConstantTensor& constant : at_.used) {
    if (constant.requires_grad) continue;
    if (constant.tensor.grad_fn() != nullptr) refuse_custom_function(constant.tensor, place);
    if (constant.tensor.requires_grad()) refuse_trained(constant.tensor, place);
  }
}

std::vector<at::Tensor> Matcher::tensors_so_far() const {
  std::vector<at::Tensor> tensors;
  for (ValueId first : at_.recording->same_impl) {
    const at::Tensor& named = at_.recording->tensors[first];
    tensors.push_back(named.defined() ? named : lock(ghosts_[static_cast<size_t>(first)]));
  }
  return tensors;
}

bool Matcher::find_values(const std::vector<at::Tensor>& tensors, std::vector<ValueId>& values) const {
  const ValueId num_values = values_of_prefix(at_.recording->graph, at_.position);
  values.clear();
  for (const at::Tensor& tensor : tensors) {
    const Ghost* ghost = as_ghost(tensor);
    const bool is_of_run = ghost != nullptr && ghost->run == ghost_run_.number && ghost->value != kNoValue;
    ValueId found = kNoValue;
    for (ValueId id = 0; id < num_values; ++id) {
      const ValueId first = at_.recording->same_impl[id];
      if (is_of_run ? ghost->value == first : at_.recording->tensors[first].is_same(tensor)) found = id;
    }
    if (found == kNoValue) return false;
    values.push_back(found);
  }
  return true;
}

std::shared_ptr<Recording> Matcher::switch_to_one_of(const std::vector<std::shared_ptr<Recording>>& others, size_t num_roots,
                                                     const std::function<bool()>& goes_on) {
  if (others.size() == 1) return nullptr;  // it is the own one
  const Match own = at_;
  const Marks before = marks();
  for (const auto& candidate : others) {
    std::optional<Match> other = candidate == own.recording ? std::nullopt : own.of(candidate, num_roots);
    if (!other) continue;
    at_ = std::move(*other);
    ghosts_.resize(candidate->graph.values.size(), weak(at::Tensor()));
    if (goes_on()) return candidate;
    go_back_to(before);  // of the ghosts, which are numbered by the candidate
    at_ = own;
    ghosts_.resize(own.recording->graph.values.size(), weak(at::Tensor()));
  }
  return nullptr;
}

}  // namespace smp::runtime
