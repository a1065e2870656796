// The ghosts that a matched run hands out, and what they are in its recording.
#include <algorithm>

#include "runtime/capture/history.h"
#include "runtime/capture/matcher.h"
#include "runtime/capture/places.h"
#include "runtime/capture/recorder.h"

namespace smp::runtime {

using namespace partitioner;

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
    if (!is_as_handed_out(ghost)) refuse_history(ghost, describe_place("capture", module()));
    set_gradient(ghost, change.requires_grad, ghost_run_);
  }
}

// Of what a matched run has handed out, and of the parameters, buffers and constants that it has used.
void Matcher::check_histories() const {
  const std::string place = describe_place("capture", module());
  for (const WeakTensor& each : ghosts_) {
    const at::Tensor ghost = lock(each);
    if (ghost.defined() && !is_as_handed_out(ghost)) refuse_history(ghost, place);
  }
  for (const at::Tensor& named : at_.recording->tensors) {
    if (named.defined() && named.grad_fn() != nullptr) refuse_custom_function(named, place);
  }
  for (const ConstantTensor& constant : at_.used) {
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

}  // namespace smp::runtime
