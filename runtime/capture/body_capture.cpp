// Matched second runs, which answer from the recording without recording again, and the way back (docs/decisions/capture.md).
#include "runtime/capture/body_capture.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "partitioner/graph/graph_io.h"
#include "runtime/capture/arguments.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/places.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

// Into `text`, whose memory is used again.
void put_full_key(const std::vector<at::Tensor>& inputs, const std::string& key, std::string& text) {
  text.assign(key);
  auto put = [&text](int64_t number) { text.append(reinterpret_cast<const char*>(&number), sizeof number); };
  for (const at::Tensor& input : inputs) {
    put(static_cast<int64_t>(input.scalar_type()));
    put(input.dim());
    for (int64_t size : input.sizes()) put(size);
    for (int64_t stride : input.strides()) put(stride);
  }
  put(at::GradMode::is_enabled());
  const Autocast autocast = current_autocast();
  put(autocast.enabled ? static_cast<int64_t>(autocast.dtype) : -1);
  put(static_cast<int64_t>(at::get_default_dtype_as_scalartype()));
}

}  // namespace

std::vector<at::Tensor> BodyCapture::begin(const std::vector<at::Tensor>& inputs, const std::string& key) {
  abandon();
  put_full_key(inputs, key, key_);
  const auto bucket = recordings_.find(key_);
  if (bucket == recordings_.end()) {
    recorder_ = std::make_unique<Recorder>(bindings_);
    return recorder_->start(inputs);
  }
  begin_with(bucket->second.front());
  ghosts_ = &matching_->tensors;
  std::vector<at::Tensor> ghosts;
  ghosts.reserve(inputs.size());
  for (ValueId id : matching_->graph.inputs) ghosts.push_back((*ghosts_)[id]);
  skip_synthesised();
  return ghosts;
}

void BodyCapture::abandon() noexcept {
  for (const auto& recording : left_) recording->any_changed = true;
  if (matching_) matching_->any_changed = true;
  recorder_.reset();
  run_ = {};
  used_.clear();
  equal_.reset();
  position_ = 0;
  losses_.clear();
  loss_positions_.clear();
  reads_.clear();
  hosts_.clear();
  host_memory_.clear();
  release_run();
}

void BodyCapture::mark_backward(const at::Tensor& given) {
  const at::Tensor loss = ghost_leaving(given);
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "backward: expected a loss with one element, got ",
                    loss.defined() ? c10::str("sizes ", loss.sizes()) : "an undefined tensor",
                    ". Reduce it with mean() or sum().");
  TORCH_CHECK_VALUE(loss.requires_grad(),
                    "backward: expected a loss that depends on trainable parameters, got one that requires no "
                    "gradient. Is grad mode off, or was the model's output detached?");
  TORCH_CHECK_VALUE(!current_autocast().enabled,
                    "backward: expected a call outside of autocast, whose region ends with the loss, got one inside. "
                    "End the region before backward(): gradients have the dtypes of their forward anyway.");
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  if (!recorder_ && !matches_root(loss) && !switch_recording([&] { return matches_root(loss); })) go_back_to_recording();
  const NodeId position = recorder_ ? static_cast<NodeId>(recorder_->recording().graph.nodes.size()) : position_;
  if (recorder_) recorder_->add_backward_root(loss, position);
  losses_.push_back(loss);
  loss_positions_.push_back(position);
}

// The stages run the backwards after every operator of the body, so the recorded root is this loss only if nothing
// writes to its memory from here on.
bool BodyCapture::matches_root(const at::Tensor& loss) {
  const Graph& graph = matching_->graph;
  const size_t number = losses_.size();
  if (number >= graph.backward_roots.size()) return false;
  const ValueId root = graph.backward_roots[number];
  if (!matches_tensor(loss, root)) return false;
  const int32_t storage = graph.values[root].storage;
  return std::none_of(graph.nodes.begin() + position_, graph.nodes.end(), [storage](const Node& node) {
    const auto& written = node.written_storages;
    return std::find(written.begin(), written.end(), storage) != written.end();
  });
}

const std::string& BodyCapture::current_module() const {
  static const std::string none;
  if (recorder_) {
    const Graph& graph = recorder_->recording().graph;
    return module_in_texts(graph, static_cast<ValueId>(graph.values.size()), recorder_->last_module());
  }
  if (position_ == 0) return none;
  const Graph& graph = matching_->graph;
  return module_in_texts(graph, values_of_prefix(graph, position_), graph.nodes[static_cast<size_t>(position_ - 1)].module);
}

void BodyCapture::operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (!hosts_.empty()) return call_with_hosts(op, stack);
  record_or_match(op, stack);
}

void BodyCapture::engine_called() { refuse_engine(describe_place("autograd", current_module())); }

void BodyCapture::record_or_match(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (!recorder_ && matches_call(op, stack)) {
    equal_.operator_follows(op, stack);
    const bool is_for_host = reader_ && asks_for_host_copy(*matching_->calls[static_cast<size_t>(position_)].info, stack);
    answer(stack);
    if (is_for_host) stack.back() = host_of(stack.back().toTensor());
    return;
  }
  const OperatorInfo& info = operator_info(op);
  const bool is_for_host = reader_ && asks_for_host_copy(info, stack);
  if (info.kind == OperatorClass::kReadsValue && reader_) {
    equal_.operator_follows(op, stack);
    return answer_read(op, stack);
  }
  if (info.kind == OperatorClass::kAnsweredByIdentity) return equal_.answer(op, stack, current_module());
  equal_.operator_follows(op, stack);
  if (info.kind == OperatorClass::kGeometryQuery) return op.callBoxed(stack);
  if (!recorder_) {
    if (!switch_recording([&] { return matches_call(op, stack); })) go_back_to_recording();
  }
  recorder_ ? recorder_->operator_called(op, stack) : answer(stack);
  if (is_for_host) stack.back() = host_of(stack.back().toTensor());
}

bool BodyCapture::matches_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto n = static_cast<size_t>(position_);
  if (n >= matching_->calls.size() || !(matching_->calls[n].op == op)) return false;
  const Node& node = matching_->graph.nodes[n];
  if (node.grad_enabled != at::GradMode::is_enabled() || !(node.autocast == current_autocast())) return false;
  const size_t num_scalars = run_.scalars.size(), num_constants = run_.constants.size(), num_used = used_.size();
  const size_t first = stack.size() - node.arguments.size();
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (matches_argument(stack[first + i], node.arguments[i], static_cast<int32_t>(i)) && may_write(stack[first + i], i)) continue;
    run_.scalars.resize(num_scalars);
    run_.constants.resize(num_constants);
    used_.resize(num_used);
    return false;
  }
  return true;
}

bool BodyCapture::matches_argument(const c10::IValue& actual, const Argument& recorded, int32_t position) {
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
  const RecordedCall& call = matching_->calls[static_cast<size_t>(position_)];
  c10::IValue copy = actual;
  Argument value = to_argument(copy, nullptr, call.info->name);
  if (same_argument(value, recorded)) return true;
  // Another number of the same type leaves the geometry alone: the graph stays, the number travels.
  const bool may_change = !actual.isNone() && may_travel(call, static_cast<size_t>(position), value, recorded);
  if (may_change) run_.scalars.push_back({position_, position, std::move(value)});
  return may_change;
}

bool BodyCapture::matches_tensor(const at::Tensor& actual, ValueId recorded) {
  const at::Tensor& expected = (*ghosts_)[recorded];
  const Value& value = matching_->graph.values[recorded];
  if (value.kind == ValueKind::kConstant) return matches_constant(actual, recorded);
  if (actual.is_same(expected)) {
    // A parameter may have been frozen, or have got data of another type, since it was recorded.
    const bool is_named = value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer;
    return !is_named || (actual.requires_grad() == value.spec.requires_grad && same_geometry(actual, value.spec));
  }
  if (!actual.defined() || value.kind != ValueKind::kResult) return false;
  // A copy made behind the dispatcher lives on the same storage and has no gradient.
  if (actual.requires_grad() || value.spec.requires_grad || !same_geometry(actual, value.spec)) return false;
  if (actual.storage().unsafeGetStorageImpl() == expected.storage().unsafeGetStorageImpl()) {
    return take_copy(actual, recorded);
  }
  const NamedTensor* base = bindings_.find_storage(actual);
  if (base == nullptr || bindings_.find(actual) != nullptr) return false;
  const auto& values = matching_->graph.values;
  return std::any_of(values.begin(), values.end(), [&](const Value& other) {
    return other.storage == value.storage && other.kind == base->kind && other.name == base->name;
  });
}

bool BodyCapture::matches_constant(const at::Tensor& actual, ValueId recorded) {
  const auto with_value = [recorded](const ConstantTensor& constant) { return constant.value == recorded; };
  const auto used = std::find_if(used_.begin(), used_.end(), with_value);
  if (used != used_.end()) {
    return (actual.is_same(used->tensor) && owns_memory(actual)) || same_content(actual, used->content);
  }
  const Value& value = matching_->graph.values[recorded];
  if (!actual.defined() || !can_be_constant(actual) || actual.requires_grad() || bindings_.find_storage(actual) != nullptr ||
      actual.unsafeGetTensorImpl()->is_wrapped_number() != value.is_wrapped_number) {
    return false;
  }
  const auto constant = std::find_if(matching_->constants.begin(), matching_->constants.end(), with_value);
  if (same_content(actual, constant->content)) {
    used_.push_back({recorded, actual, constant->content});
    return true;
  }
  if (actual.scalar_type() != value.spec.dtype || !actual.sizes().equals(value.spec.sizes)) return false;
  at::Tensor content = snapshot_of(actual);
  if (!same_geometry(content, value.spec)) return false;
  run_.constants.push_back({recorded, content});
  used_.push_back({recorded, actual, std::move(content)});
  return true;
}

void BodyCapture::skip_synthesised() {
  while (static_cast<size_t>(position_) < matching_->calls.size() &&
         matching_->calls[static_cast<size_t>(position_)].synthesised) {
    expect_copies();
    ++position_;
  }
}

void BodyCapture::answer(torch::jit::Stack& stack) {
  const auto n = static_cast<size_t>(position_);
  const RecordedCall& call = matching_->calls[n];
  const Node& node = matching_->graph.nodes[n];
  const size_t first = stack.size() - node.arguments.size();
  const auto& returned_argument = call.info->returned_argument;
  if (call.info->changes_geometry_in_place) {
    const TensorSpec& spec = matching_->graph.values[node.outputs[0]].spec;
    (*ghosts_)[node.outputs[0]].unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides,
                                                                                     spec.storage_offset);
  }
  if (call.changes_gradient) change_gradients(node);
  // A torch:: factory calls here below autograd and gives the body a copy of the result.
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality)) expect_copies();
  auto tensor = [&](size_t k) {
    return node.outputs[k] == kNoValue ? at::Tensor() : (*ghosts_)[node.outputs[k]];
  };
  if (returned_argument.size() == 1) {
    c10::IValue result;
    if (returned_argument[0] >= 0) {
      result = stack[first + static_cast<size_t>(returned_argument[0])];
    } else if (call.returns_list) {
      c10::List<at::Tensor> list;
      for (size_t k = 0; k < node.outputs.size(); ++k) list.push_back(tensor(k));
      result = std::move(list);
    } else {
      result = tensor(0);
    }
    torch::jit::drop(stack, node.arguments.size());
    stack.push_back(std::move(result));
  } else {
    std::vector<c10::IValue> results;
    for (size_t k = 0; k < returned_argument.size(); ++k) {
      results.push_back(returned_argument[k] >= 0 ? stack[first + static_cast<size_t>(returned_argument[k])]
                                                  : c10::IValue(tensor(k)));
    }
    torch::jit::drop(stack, node.arguments.size());
    for (auto& result : results) stack.push_back(std::move(result));
  }
  ++num_matched_;
  ++position_;
  skip_synthesised();
}

CapturedBody BodyCapture::finish(const std::vector<at::Tensor>& given) {
  std::vector<at::Tensor> returned;
  for (const at::Tensor& tensor : given) returned.push_back(ghost_leaving(tensor));
  equal_.body_ends();
  check_hooks();
  if (!recorder_) check_histories();
  if (!recorder_ && !finish_matched(returned) && !switch_recording([&] { return finish_matched(returned); })) {
    go_back_to_recording();
  }
  if (recorder_) return finish_recorded(returned);
  for (const ConstantTensor& constant : used_) {
    if (owns_memory(constant.tensor)) check_unchanged(constant, describe_place("capture", current_module()));
  }
  CapturedBody run = std::exchange(run_, {});
  for (ConstantTensor& constant : used_) run.outside.push_back(std::move(constant.tensor));
  used_.clear();
  losses_.clear();
  loss_positions_.clear();
  reads_.clear();
  hosts_.clear();
  host_memory_.clear();
  matching_->last_use = ++num_runs_;
  return run;
}

// All ghosts of a recording have one gradient function, which leads to no other.
void BodyCapture::check_hooks() const {
  const auto check = [this](const Recording& recording) {
    if (has_hooks(*recording.grad_fn)) refuse_hooks(recording.grad_fn.get(), describe_place("capture", current_module()));
  };
  for (const auto& recording : left_) check(*recording);
  if (matching_) check(*matching_);
}

bool BodyCapture::finish_matched(const std::vector<at::Tensor>& returned) {
  const Graph& graph = matching_->graph;
  if (static_cast<size_t>(position_) != graph.nodes.size()) return false;
  if (losses_.size() != graph.backward_roots.size() || returned.size() != graph.returned.size()) return false;
  for (size_t i = 0; i < returned.size(); ++i) {
    if (!returned[i].defined() || !matches_tensor(returned[i], graph.returned[i])) return false;
  }
  return true;
}

CapturedBody BodyCapture::finish_recorded(const std::vector<at::Tensor>& returned) {
  std::vector<ValueId> ids;
  for (const at::Tensor& tensor : returned) ids.push_back(recorder_->value_of(tensor, "a tensor returned from the body"));
  std::shared_ptr<Recording> recording = recorder_->finish(std::move(ids), key_);
  ++num_recordings_;
  Bucket& bucket = recordings_[key_];
  const auto known = std::find_if(bucket.begin(), bucket.end(), [&](const auto& r) { return r->hash == recording->hash && same_graph(r->graph, recording->graph); });
  if (known != bucket.end()) {
    std::rotate(bucket.begin(), known, known + 1);
  } else {
    bucket.insert(bucket.begin(), recording);
  }
  std::vector<ConstantOverride> constants;
  if (bucket.front() != recording) {
    for (const ConstantTensor& constant : recording->constants) constants.push_back({constant.value, constant.content});
  }
  CapturedBody run{.recording = bucket.front(), .scalars = {}, .constants = std::move(constants)};
  for (const ConstantTensor& constant : recording->constants) run.outside.push_back(constant.tensor);
  bucket.front()->last_use = ++num_runs_;
  forget_least_used();
  abandon();
  return run;
}

}  // namespace smp::runtime
