// The ghosts that a matched run hands out, and the way back to recording, which goes on with them.
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "runtime/capture/arguments.h"
#include "runtime/capture/body_capture.h"
#include "runtime/capture/history.h"
#include "runtime/capture/places.h"

namespace smp::runtime {

using namespace partitioner;

// Fresh in every run, so that one which somebody keeps beyond its run is known by the run's number. An operator that has
// nothing to do (dropout for p = 0) gives back a ghost that it was given.
at::Tensor BodyCapture::hand_out(ValueId id) {
  if (id == kNoValue) return {};
  const auto first = static_cast<size_t>(matching_->same_impl[id]);
  if (static_cast<size_t>(id) != first) return lock(ghosts_[first]);
  const Value& value = matching_->graph.values[id];
  at::Tensor ghost = make_ghost(value.spec, storages_[static_cast<size_t>(value.storage)], ghost_run_, id);
  ghosts_[first] = weak(ghost);
  return ghost;
}

// What an in-place operator does to ghosts: to the geometry of its own, and to the gradient of all on the memory.
void BodyCapture::follow_writes(const RecordedCall& call, const torch::jit::Stack& stack) {
  const Node& node = matching_->graph.nodes[static_cast<size_t>(position_)];
  const auto* arguments = &stack.end()[-call.info->num_arguments];
  for (size_t i = 0; i < call.info->argument_written.size(); ++i) {
    if (!call.info->argument_written[i] || !arguments[i].isTensor() || as_ghost(arguments[i].toTensor()) == nullptr) continue;
    const at::Tensor& written = written_.emplace_back(arguments[i].toTensor());
    if (!call.info->changes_geometry_in_place) continue;
    const TensorSpec& spec = matching_->graph.values[node.outputs[0]].spec;
    written.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides, spec.storage_offset);
  }
  for (const GradientChange& change : call.gradients) {
    const at::Tensor ghost = lock(ghosts_[static_cast<size_t>(change.first)]);
    if (!ghost.defined()) continue;
    if (!is_as_handed_out(ghost)) refuse_history(ghost, describe_place("capture", current_module()));
    set_gradient(ghost, change.requires_grad, ghost_run_);
  }
}

// Of what a matched run has handed out, and of the parameters, buffers and constants that it has used.
void BodyCapture::check_histories() const {
  const std::string place = describe_place("capture", current_module());
  for (const WeakTensor& each : ghosts_) {
    const at::Tensor ghost = lock(each);
    if (ghost.defined() && !is_as_handed_out(ghost)) refuse_history(ghost, place);
  }
  for (const at::Tensor& named : matching_->tensors) {
    if (named.defined() && named.grad_fn() != nullptr) refuse_custom_function(named, place);
  }
  for (const ConstantTensor& constant : used_) {
    if (constant.tensor.grad_fn() != nullptr) refuse_custom_function(constant.tensor, place);
    if (constant.tensor.requires_grad()) refuse_trained(constant.tensor, place);
  }
}

// By value: parameters and buffers, and the ghosts that the body still holds.
std::vector<at::Tensor> BodyCapture::tensors_so_far() const {
  std::vector<at::Tensor> tensors;
  for (ValueId first : matching_->same_impl) {
    const at::Tensor& named = matching_->tensors[first];
    tensors.push_back(named.defined() ? named : lock(ghosts_[static_cast<size_t>(first)]));
  }
  return tensors;
}

void BodyCapture::go_back_to_recording() {
  check_histories();
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);  // a body that ends too early comes here from no operator
  recorder_ = std::make_unique<Recorder>(bindings_, ghost_run_);
  {
    // The operators so far were called under autograd, whatever the next one is called under (torch:: factories).
    const c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
    const c10::impl::ForceDispatchKeyGuard under_autograd(now.included_,
                                                          now.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    recorder_->continue_from(run_, tensors_so_far(), storages_, used_, position_);
  }
  for (const EarlierRead& earlier : reads_) recorder_->add_read(earlier.value, earlier.position);
  for (size_t k = 0; k < losses_.size(); ++k) recorder_->add_backward_root(losses_[k], loss_positions_[k]);
}

}  // namespace smp::runtime
