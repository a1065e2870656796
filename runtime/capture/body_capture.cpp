// One run of a body: matched as long as it equals a recording, recorded from the first difference on.
#include "runtime/capture/body_capture.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "runtime/capture/devices.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/opaque.h"
#include "runtime/capture/places.h"
#include "runtime/capture/recompute_regions.h"
#include "runtime/libtorch/boxed_tensors.h"

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

// Whether it is called below autograd, and would make gradients above it: it makes none, as without grad mode.
bool leaves_out_gradients(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::AutogradFunctionality)) return false;
  if (op.operator_name().name.ends_with("_like")) return false;  // none anywhere; torch::zeros_like is called below
  bool any_requires = false;
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](int, const at::Tensor& tensor) { any_requires = any_requires || tensor.requires_grad(); });
  }
  return any_requires;
}

c10::OperatorHandle find_operator(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

}  // namespace

std::vector<at::Tensor> BodyCapture::begin(const std::vector<at::Tensor>& inputs, const std::string& key) {
  abandon();
  put_full_key(inputs, key, key_);
  switches_ = arithmetic_switches();
  training_.note();
  ghost_run_ = begin_ghost_run();
  begin_recompute_regions();
  if (const Recordings::Bucket* bucket = recordings_.find(key_)) return matcher_.start(bucket->front(), ghost_run_);
  recorder_ = std::make_unique<Recorder>(bindings_, ghost_run_);
  return recorder_->start(inputs);
}

void BodyCapture::abandon() noexcept {
  end_ghost_run();
  recorder_.reset();
  matcher_.reset();
  roots_.clear();
  reads_.clear();
  replaced_.begin();
  equal_.reset();
  hosts_.clear();
}

// `matches`: whether what comes next is what the matched recording expects.
void BodyCapture::match_or_record(const std::function<bool()>& matches) {
  if (recorder_ || matches()) return;
  const auto other = matcher_.switch_to_one_of(*recordings_.find(key_), roots_.size(), matches);
  if (other == nullptr) return go_back_to_recording();
  recordings_.move_to_front(other);
}

void BodyCapture::go_back_to_recording() {
  matcher_.check_histories();
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);  // a body that ends too early comes here from no operator
  auto recorder = std::make_unique<Recorder>(bindings_, ghost_run_);
  {
    // The operators so far were called under autograd, whatever the next one is called under (torch:: factories).
    const c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
    const c10::impl::ForceDispatchKeyGuard under_autograd(
        now.included_, now.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    const OpaqueValues values([&](const at::Tensor& tensor) { return known_value(*recorder, tensor); });
    recorder->continue_from(matcher_.match(), matcher_.tensors_so_far());
  }
  for (const EarlierRead& earlier : reads_) recorder->add_read(earlier.value, earlier.position);
  for (const Root& root : roots_) recorder->add_backward_root(root.loss, root.position);
  recorder_ = std::move(recorder);
}

void BodyCapture::mark_backward(const at::Tensor& given) {
  record_replaced();
  const at::Tensor loss = hosts_.ghost_leaving(given);
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "backward: expected a loss with one element, got ",
                    loss.defined() ? c10::str("sizes ", loss.sizes()) : "an undefined tensor",
                    ". Reduce it with mean() or sum().");
  TORCH_CHECK_VALUE(loss.requires_grad(),
                    "backward: expected a loss that depends on trainable parameters, got one that requires no gradient. Is "
                    "grad mode off, or was the model's output detached?");
  TORCH_CHECK_VALUE(!current_autocast().enabled,
                    "backward: expected a call outside of autocast, whose region ends with the loss, got one inside. End "
                    "the region before backward(): gradients have the dtypes of their forward anyway.");
  check_arithmetic("backward");
  training_.check(current_module());
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  match_or_record([&] { return matcher_.matches_root(loss, roots_.size()); });
  const NodeId at = position();
  if (recorder_) recorder_->add_backward_root(loss, at);
  roots_.push_back({loss, at});
}

void BodyCapture::operator_called(const c10::OperatorHandle& called, torch::jit::Stack& stack) {
  // Python's torch.tensor([1, 2]) hides from all keys how it makes the tensor; then it lifts what it has made, which the
  // body may write to, and detaches it in place.
  static const c10::OperatorHandle lift = find_operator("aten::lift_fresh"), detach = find_operator("aten::detach_"),
                                   clone = find_operator("aten::clone");
  record_replaced();
  if (called == detach && !stack.back().toTensor().requires_grad()) return;
  if (const char* unseen = unseen_around_operators()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, describe_place(called.operator_name().name, current_module()),
        ": expected operators that the stages can run later, got one under ", unseen,
        ", which they would run without. Leave it out of the step, or call code that needs it through "
        "smp::opaque.");
  }
  if (ReplacedData::asks(called)) {
    const at::Tensor tensor = stack.end()[-2].toTensor(), source = stack.end()[-1].toTensor();
    if (replaced_.note(tensor, source, describe_place(kSetData, current_module()))) {
      torch::jit::drop(stack, 2);
      return torch::jit::push(stack, true);
    }
  }
  // Ghosts, and what the stages make for a read, outlive the region.
  std::optional<c10::InferenceMode> no_inference;
  if (c10::InferenceMode::is_enabled()) {
    no_inference.emplace(false);
    at::GradMode::set_enabled(false);
  }
  const at::AutoGradMode with_grad(at::GradMode::is_enabled() && !leaves_out_gradients(called, stack));
  const bool is_literal = called == lift && as_ghost(stack.back().toTensor()) == nullptr;
  if (is_literal) stack.emplace_back();  // its memory format
  const c10::OperatorHandle& op = copying_between_devices(is_literal ? clone : called, stack, bindings_);
  hosts_.empty() ? record_or_match(op, stack) : hosts_.operator_called(op, stack);
}

// The body has replaced the data of a parameter or buffer, if at all, since the last that was called.
void BodyCapture::record_replaced() {
  static const c10::OperatorHandle set_data = find_operator(kSetData);
  const auto call = replaced_.take();
  if (!call) return;
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  torch::jit::Stack stack{call->tensor, call->source};
  hosts_.empty() ? record_or_match(set_data, stack) : hosts_.operator_called(set_data, stack);
}

void BodyCapture::engine_called() { refuse_engine(describe_place("autograd", current_module())); }

void BodyCapture::record_or_match(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const bool matches = !recorder_ && matcher_.matches_call(op, stack);
  const OperatorInfo& info = matches ? matcher_.next_info() : operator_info(op);
  if (!matches && info.kind == OperatorClass::kAnsweredByIdentity) return equal_.answer(op, stack, current_module());
  equal_.operator_follows(op, stack);
  const at::Tensor brought = reader_ && cpu_is_read_ ? asked_for_on_host(info, stack) : at::Tensor();
  if (!matches) {
    if (info.kind == OperatorClass::kReadsValue && reader_) {
      check_arithmetic(info.name);
      return answer_read(op, stack);
    }
    if (info.kind == OperatorClass::kGeometryQuery) return op.callBoxed(stack);
    match_or_record([&] { return matcher_.matches_call(op, stack); });
    if (recorder_) check_arithmetic(info.name);
  }
  if (recorder_) {
    const OpaqueValues values([this](const at::Tensor& tensor) { return known_value(*recorder_, tensor); });
    recorder_->operator_called(op, stack);
  } else {
    matcher_.answer(stack);
    ++num_matched_;
  }
  if (brought.defined()) stack.back() = hosts_.host_of(stack.back().toTensor(), brought);
}

// Without the pipeline: for what is recorded by values.
at::Tensor BodyCapture::known_value(const Recorder& recorder, const at::Tensor& tensor) const {
  const std::optional<ValueRead> wanted = reader_ ? recorder.local_read(tensor) : std::nullopt;
  if (!wanted) return {};
  const AmbientModes ambient;
  set_modes(/*grad_enabled=*/false, {});
  return reader_(*wanted).front();
}

// At each operator of a recording; of a run that matches one only where it reads, at its backwards and its end, for a body
// pays for that in each microbatch.
void BodyCapture::check_arithmetic(const std::string& op) const {
  const std::string changed = differing(switches_, arithmetic_switches());
  if (!changed.empty()) refuse_other_arithmetic(changed, describe_place(op, current_module()));
}

int32_t BodyCapture::memory_of(const at::Tensor& tensor) const {
  if (recorder_) return recorder_->memory_of(tensor);
  std::vector<ValueId> values;
  const NamedTensor* named = bindings_.find_storage(tensor);
  if (!matcher_.find_values({named == nullptr ? tensor : named->tensor}, values)) return -1;
  return matcher_.match().recording->graph.values[values.front()].storage;
}

ValueRead BodyCapture::describe_run() const {
  const Match& match = matcher_.match();
  ValueRead run{.graph = recorder_ ? recorder_->recording().graph : match.recording->graph, .num_nodes = position()};
  if (!recorder_) {
    run.matched = match.recording;
    run.scalars = match.run.scalars;
    run.changed_constants = match.run.constants;
  }
  for (const ConstantTensor& constant : recorder_ ? recorder_->recording().constants : match.used) {
    run.constants.push_back({constant.value, constant.content});
  }
  return run;
}

std::vector<at::Tensor> BodyCapture::read(const std::vector<at::Tensor>& tensors) {
  std::vector<ValueId> values;
  bool is_local = false;
  match_or_record([&] {
    if (!matcher_.find_values(tensors, values)) return false;
    const Recording& recording = *matcher_.match().recording;
    is_local = local_slice(recording.graph, position(), values).has_value();
    const auto& kept = recording.graph.read;
    return is_local || std::all_of(values.begin(), values.end(), [&](ValueId id) {
             return std::find(kept.begin(), kept.end(), kept_value(recording, id, position())) != kept.end();
           });
  });
  if (recorder_) {
    values.clear();
    for (const at::Tensor& tensor : tensors) values.push_back(recorder_->value_of(tensor, "a value that the body reads"));
    is_local = local_slice(recorder_->recording().graph, position(), values).has_value();
  }
  for (ValueId& id : values) {
    if (is_local) break;
    if (!recorder_) reads_.push_back({id, position()});
    id = recorder_ ? recorder_->add_read(id, position()) : kept_value(*matcher_.match().recording, id, position());
  }
  training_.check(current_module());
  ValueRead run = describe_run();
  run.values = values;
  run.is_local = is_local;
  // What is run has its own modes, operator by operator, whatever region the body reads in.
  const bool grad_enabled = at::GradMode::is_enabled();
  const AmbientModes ambient;
  const c10::InferenceMode no_inference(false);
  set_modes(grad_enabled, {});
  std::vector<at::Tensor> contents = reader_(run);
  training_.note();  // the first read of all places the model, which calls hooks of the program
  return contents;
}

at::Tensor BodyCapture::look_at(const at::Tensor& tensor) {
  record_replaced();
  if (as_ghost(tensor) == nullptr && bindings_.find_storage(tensor) == nullptr) return {};
  if (!reader_) refuse_value_read("a look at a tensor", current_module());
  return read({tensor}).front().clone();
}

void BodyCapture::answer_read(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const size_t first = stack.size() - static_cast<size_t>(operator_info(op).num_arguments);
  std::vector<at::Tensor> tensors;
  const auto is_wanted = [&](const c10::IValue& argument) {
    return argument.isTensor() && argument.toTensor().defined() &&
           (as_ghost(argument.toTensor()) != nullptr || bindings_.find_storage(argument.toTensor()) != nullptr);
  };
  for (size_t i = first; i < stack.size(); ++i) {
    if (is_wanted(stack[i])) tensors.push_back(stack[i].toTensor());
  }
  std::vector<at::Tensor> real = read(tensors);
  size_t next = 0;
  for (size_t i = first; i < stack.size(); ++i) {
    if (is_wanted(stack[i])) stack[i] = std::move(real[next++]);
  }
  op.callBoxed(stack);
}

CapturedBody BodyCapture::finish(const std::vector<at::Tensor>& given) {
  record_replaced();
  std::vector<at::Tensor> returned;
  for (const at::Tensor& tensor : given) returned.push_back(hosts_.ghost_leaving(tensor));
  equal_.body_ends();
  check_arithmetic("the end of the body");
  training_.check(current_module());
  check_no_hooks(ghost_run_, describe_place("capture", current_module()));
  hosts_.check_histories();
  if (!recorder_) matcher_.check_histories();
  match_or_record([&] { return matcher_.matches_end(returned, roots_.size()); });
  CapturedBody run = recorder_ ? finish_recorded(returned) : matcher_.match().finish();
  if (!recorder_) recordings_.note_use(*matcher_.match().recording);
  abandon();
  return run;
}

CapturedBody BodyCapture::finish_recorded(const std::vector<at::Tensor>& returned) {
  std::vector<ValueId> ids;
  for (const at::Tensor& tensor : returned) ids.push_back(recorder_->value_of(tensor, "a tensor returned from the body"));
  const std::shared_ptr<Recording> own = recorder_->finish(std::move(ids), key_);
  ++num_recordings_;
  CapturedBody run{.recording = recordings_.add(own), .scalars = {}, .constants = {}};
  for (const ConstantTensor& constant : own->constants) {
    if (run.recording != own) run.constants.push_back({constant.value, constant.content});
    run.outside.push_back(constant.tensor);
  }
  return run;
}

}  // namespace smp::runtime
