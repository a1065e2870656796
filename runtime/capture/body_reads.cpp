// Values that a body reads: found among its ghosts, fetched by the reader, given to the operator that asked.
#include <algorithm>

#include "runtime/capture/body_capture.h"

namespace smp::runtime {

using namespace partitioner;

// The values that `tensors` have now: of several with one ghost (written in place) the last one. False when one is none
// of those of the operators so far.
bool BodyCapture::find_values(const std::vector<at::Tensor>& tensors, std::vector<ValueId>& values) const {
  const ValueId num_values = values_of_prefix(matching_->graph, position_);
  values.clear();
  for (const at::Tensor& tensor : tensors) {
    const Ghost* ghost = as_ghost(tensor);
    const bool is_of_run = ghost != nullptr && ghost->run == ghost_run_.number && ghost->value != kNoValue;
    ValueId found = kNoValue;
    for (ValueId id = 0; id < num_values; ++id) {
      const ValueId first = matching_->same_impl[id];
      if (is_of_run ? ghost->value == first : matching_->tensors[first].is_same(tensor)) found = id;
    }
    if (found == kNoValue) return false;
    values.push_back(found);
  }
  return true;
}

ValueRead BodyCapture::describe_run() const {
  if (recorder_) {
    const Recording& recording = recorder_->recording();
    ValueRead run{.matched = nullptr, .graph = recording.graph};
    run.num_nodes = static_cast<NodeId>(recording.graph.nodes.size());
    for (const ConstantTensor& constant : recording.constants) run.constants.push_back({constant.value, constant.content});
    return run;
  }
  ValueRead run{.matched = matching_, .graph = matching_->graph};
  run.num_nodes = position_;
  run.scalars = run_.scalars;
  run.changed_constants = run_.constants;
  for (const ConstantTensor& constant : used_) run.constants.push_back({constant.value, constant.content});
  return run;
}

std::vector<at::Tensor> BodyCapture::read(const std::vector<at::Tensor>& tensors) {
  std::vector<ValueId> values;
  bool is_local = false;
  const auto expects_read = [&] {
    if (!find_values(tensors, values)) return false;
    is_local = local_slice(matching_->graph, position_, values).has_value();
    const auto& kept = matching_->graph.read;
    return is_local || std::all_of(values.begin(), values.end(), [&](ValueId id) {
             return std::find(kept.begin(), kept.end(), kept_value(*matching_, id, position_)) != kept.end();
           });
  };
  if (!recorder_ && !expects_read() && !switch_recording(expects_read)) go_back_to_recording();
  if (recorder_) {
    values.clear();
    for (const at::Tensor& tensor : tensors) values.push_back(recorder_->value_of(tensor, "a value that the body reads"));
    const Graph& graph = recorder_->recording().graph;
    is_local = local_slice(graph, static_cast<NodeId>(graph.nodes.size()), values).has_value();
  }
  for (ValueId& id : values) {
    if (is_local) break;
    if (!recorder_) reads_.push_back({id, position_});
    id = recorder_ ? recorder_->add_read(id, static_cast<NodeId>(recorder_->recording().graph.nodes.size()))
                   : kept_value(*matching_, id, position_);
  }
  ValueRead run = describe_run();
  run.values = values;
  run.is_local = is_local;
  return reader_(run);
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

}  // namespace smp::runtime
