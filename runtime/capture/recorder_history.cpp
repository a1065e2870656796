// What the recorder checks and notes of autograd's part in the tensors that the body holds.
#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/capture/recorder.h"

namespace smp::runtime {

using namespace partitioner;

void Recorder::check_made_here(const at::Tensor& tensor) const {
  TORCH_CHECK(
      tensor.grad_fn() == nullptr, where(),
      ": expected operators of the step body only, got a tensor computed with gradients outside of it or on another thread. "
      "Its gradient would be lost: compute it inside the body, on the body's thread, or detach() it outside of the step.");
}

void Recorder::check_history(const at::Tensor& tensor, const Identity& known) const {
  if (history_of(tensor) != known.history) refuse_custom_function(tensor, where());
  const Value& first = recording_->graph.values[recording_->same_impl[known.value]];  // before it was written to
  if (is_trained(tensor) && !is_named(first)) refuse_trained(tensor, where());
}

// Of what no operator may see any more.
void Recorder::check_histories() const {
  for (const auto& [impl, known] : identities_) check_history(known.tensor, known);
  for (const WeakTensor& each : ghosts_) {
    const at::Tensor ghost = lock(each);
    if (ghost.defined() && !is_as_handed_out(ghost)) refuse_history(ghost, where());
  }
}

// What an operator has written to requires a gradient since, or none any more, under each of its names.
std::vector<GradientChange> Recorder::follow_writes(const Node& node) {
  std::vector<GradientChange> changes;
  const auto& written = node.written_storages;
  for (size_t first = 0; first < ghosts_.size() && !written.empty(); ++first) {
    const int32_t storage = recording_->graph.values[first].storage;
    if (std::find(written.begin(), written.end(), storage) == written.end()) continue;
    const at::Tensor ghost = lock(ghosts_[first]);
    if (!ghost.defined()) continue;
    const bool requires_grad = as_ghost(ghost)->stand_in.requires_grad();
    if (ghost.requires_grad() == requires_grad) continue;
    if (!is_as_handed_out(ghost)) refuse_history(ghost, where());
    set_gradient(ghost, requires_grad, run_);
    changes.push_back({static_cast<ValueId>(first), requires_grad});
  }
  return changes;
}

void Recorder::hold_written(const OperatorInfo& info, const Node& node, const std::vector<c10::IValue>& arguments) {
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (!info.argument_written[i]) continue;
    // A custom function may leave its own on a view that the body drops at once, which is looked at in the end.
    if (arguments[i].isTensor() && as_ghost(arguments[i].toTensor()) != nullptr) held_.push_back(arguments[i].toTensor());
    if (arguments[i].isTensorList()) check_list_write(info, node.arguments[i], arguments[i]);
  }
}

// The elements of a list are written but not returned, so no new value could say that one requires a gradient now.
void Recorder::check_list_write(const OperatorInfo& info, const Argument& written, const c10::IValue& seen) const {
  const auto& ids = std::get<ValueRefList>(written).ids;
  const auto tensors = seen.toTensorVector();
  for (size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] == kNoValue || recording_->graph.values[ids[k]].spec.requires_grad) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !stand_in_of(tensors[k]).requires_grad(), where(), ": expected ", info.name,
        " to write no gradients into tensors that had none, got a tensor of sizes ", tensors[k].sizes(),
        " that requires a gradient since. Call the operator tensor by tensor, or the form that returns new tensors.");
  }
}

}  // namespace smp::runtime
