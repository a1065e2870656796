// The ghosts that a matched run hands out: their state, the copies that LibTorch makes of them behind the dispatcher, and
// the way back to recording, which goes on with them.
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "runtime/capture/body_capture.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/history.h"
#include "runtime/capture/places.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

// Made outside of the step or behind the dispatcher; not one of the body's own ghosts, which are known by identity.
bool is_foreign(const at::Tensor& tensor, const std::vector<at::Tensor>& ghosts) {
  return std::none_of(ghosts.begin(), ghosts.end(), [&](const at::Tensor& ghost) { return ghost.is_same(tensor); });
}

}  // namespace

void BodyCapture::begin_with(const std::shared_ptr<Recording>& recording) {
  matching_ = recording;
  run_.recording = recording;
  restore_ghosts(*recording);
}

// The results of the operator at position_ are about to reach the body as copies: tensors on the same storage, without
// gradient. The recording saw the results themselves, because nobody else held them then.
void BodyCapture::expect_copies() {
  for (ValueId id : matching_->graph.nodes[static_cast<size_t>(position_)].outputs) {
    if (id == kNoValue) continue;
    const ValueId first = matching_->same_impl[id];
    const bool is_known = std::any_of(copies_.begin(), copies_.end(), [first](const GhostCopy& c) { return c.first == first; });
    if (!is_known) copies_.push_back({first});
  }
}

// From its first use on the copy is the ghost, so that in-place operators change the tensor that the body holds.
bool BodyCapture::take_copy(const at::Tensor& actual, ValueId recorded) {
  if (!is_foreign(actual, *ghosts_)) return false;
  const ValueId first = matching_->same_impl[recorded];
  const auto expected = std::find_if(copies_.begin(), copies_.end(), [first](const GhostCopy& c) { return c.first == first; });
  if (expected == copies_.end() || expected->is_taken) return true;
  expected->is_taken = true;
  // After a switch the storage is that of the recording left.
  std::vector<at::Tensor>& ghosts = ghosts_ == &mixed_ghosts_ ? mixed_ghosts_ : matching_->tensors;
  size_t left = matching_->holders.empty() ? ghosts.size() : matching_->holders[static_cast<size_t>(first)];
  for (size_t v = static_cast<size_t>(first); v < ghosts.size() && left > 0; ++v) {
    if (matching_->same_impl[v] != first) continue;
    ghosts[v] = actual;
    --left;
  }
  return true;
}

// What an operator writes gradients into must be the ghost itself, which requires one from then on.
bool BodyCapture::may_write(const c10::IValue& actual, size_t position) const {
  const RecordedCall& call = matching_->calls[static_cast<size_t>(position_)];
  if (!call.changes_gradient || !call.info->argument_written[position]) return true;
  const auto* ref = std::get_if<ValueRef>(&matching_->graph.nodes[static_cast<size_t>(position_)].arguments[position]);
  return ref == nullptr || actual.toTensor().is_same((*ghosts_)[ref->id]);
}

void BodyCapture::change_gradients(const Node& node) {
  for (ValueId id : node.outputs) {
    if (id == kNoValue || !(*ghosts_)[id].is_meta()) continue;
    if (!is_as_handed_out((*ghosts_)[id])) refuse_history((*ghosts_)[id]);
    set_gradient((*ghosts_)[id], matching_->graph.values[id].spec.requires_grad, matching_->grad_fn);
  }
}

void BodyCapture::refuse_history(const at::Tensor& tensor) const {
  const std::string place = describe_place("capture", current_module());
  tensor.grad_fn() != nullptr ? refuse_custom_function(tensor, place) : refuse_trained(tensor, place);
}

// Of what a matched run has handed out, and of the parameters, buffers and constants that it has used.
void BodyCapture::check_histories() const {
  for (size_t v = 0; v < ghosts_->size(); ++v) {
    const at::Tensor& tensor = (*ghosts_)[v];
    const Value& value = matching_->graph.values[matching_->same_impl[v]];  // before it was written to
    if (value.kind == ValueKind::kConstant) continue;
    if (is_named(value) ? tensor.grad_fn() != nullptr : !is_as_handed_out(tensor)) refuse_history(tensor);
  }
  for (const ConstantTensor& constant : used_) {
    if (constant.tensor.requires_grad()) refuse_history(constant.tensor);
  }
}

void BodyCapture::go_back_to_recording() {
  check_histories();
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);  // a body that ends too early comes here from no operator
  matching_->any_changed = true;
  recorder_ = std::make_unique<Recorder>(bindings_);
  {
    // The operators so far were called under autograd, whatever the next one is called under (torch:: factories).
    const c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
    const c10::impl::ForceDispatchKeyGuard under_autograd(now.included_,
                                                          now.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    std::vector<ValueId> copied;
    for (const GhostCopy& copy : copies_) {
      if (!copy.is_taken) copied.push_back(copy.first);
    }
    recorder_->continue_from(run_, *ghosts_, used_, copied, position_);
  }
  for (const EarlierRead& earlier : reads_) recorder_->add_read(earlier.value, earlier.position);
  for (size_t k = 0; k < losses_.size(); ++k) recorder_->add_backward_root(losses_[k], loss_positions_[k]);
}

void BodyCapture::release_run() {
  mixed_ghosts_.clear();
  for (const auto& recording : left_) renew_kept_ghosts(*recording, copies_);
  left_.clear();
  ghosts_ = nullptr;
  if (matching_) renew_kept_ghosts(*matching_, copies_);
  matching_.reset();
  copies_.clear();
}

// A ghost that someone still holds after its run would be taken for the next run's value: hand out a new one there. Copies
// that are no ghost of this recording are known by its storage.
void BodyCapture::renew_kept_ghosts(Recording& recording, const std::vector<GhostCopy>& copies) {
  const auto& values = recording.graph.values;
  std::vector<size_t>& holders = recording.holders;
  if (holders.empty()) {
    holders.resize(values.size(), 0);
    for (ValueId first : recording.same_impl) ++holders[static_cast<size_t>(first)];
  }
  std::vector<bool> renew;
  const auto note = [&](size_t v) {
    renew.resize(values.size(), false);
    renew[static_cast<size_t>(values[v].storage)] = true;
  };
  for (size_t v = 0; v < values.size(); ++v) {
    const ValueKind kind = values[v].kind;
    if (holders[v] == 0 || (kind != ValueKind::kResult && kind != ValueKind::kInput)) continue;
    if (recording.tensors[v].use_count() > holders[v]) note(v);
  }
  for (const auto& [first, is_taken] : copies) {
    if (static_cast<size_t>(first) >= values.size() || values[first].kind != ValueKind::kResult) continue;
    if (recording.tensors[first].storage().use_count() == 1) continue;
    size_t own = 0;
    for (size_t v = 0; v < values.size(); ++v) own += holders[v] > 0 && values[v].storage == values[first].storage ? 1 : 0;
    if (recording.tensors[first].storage().use_count() > own) note(static_cast<size_t>(first));
  }
  if (!renew.empty()) make_ghosts(recording, &renew);
}

}  // namespace smp::runtime
