// Values that a body reads: found in its recording, fetched by the reader, given to the operator that asked.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "runtime/capture/body_capture.h"
#include "runtime/capture/places.h"

namespace smp::runtime {

using namespace partitioner;

int32_t BodyCapture::memory_of(const at::Tensor& tensor) const {
  if (recorder_) return recorder_->memory_of(tensor);
  std::vector<ValueId> values;
  const NamedTensor* named = bindings_.find_storage(tensor);
  if (!matcher_.find_values({named == nullptr ? tensor : named->tensor}, values)) return -1;
  return matcher_.recording()->graph.values[values.front()].storage;
}

ValueRead BodyCapture::describe_run() const {
  const auto with_contents = [](ValueRead run, const std::vector<ConstantTensor>& constants) {
    for (const ConstantTensor& constant : constants) run.constants.push_back({constant.value, constant.content});
    return run;
  };
  if (recorder_) {
    const Recording& recording = recorder_->recording();
    return with_contents({.matched = nullptr, .graph = recording.graph, .num_nodes = position()}, recording.constants);
  }
  ValueRead run{.matched = matcher_.recording(), .graph = matcher_.recording()->graph, .num_nodes = position()};
  run.scalars = matcher_.run().scalars;
  run.changed_constants = matcher_.run().constants;
  return with_contents(std::move(run), matcher_.used());
}

std::vector<at::Tensor> BodyCapture::read(const std::vector<at::Tensor>& tensors) {
  std::vector<ValueId> values;
  bool is_local = false;
  match_or_record([&] {
    if (!matcher_.find_values(tensors, values)) return false;
    const Recording& recording = *matcher_.recording();
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
    id = recorder_ ? recorder_->add_read(id, position()) : kept_value(*matcher_.recording(), id, position());
  }
  check_training();
  ValueRead run = describe_run();
  run.values = values;
  run.is_local = is_local;
  // What is run has its own modes, operator by operator, whatever region the body reads in.
  const bool grad_enabled = at::GradMode::is_enabled();
  const AmbientModes ambient;
  const c10::InferenceMode no_inference(false);
  set_modes(grad_enabled, {});
  std::vector<at::Tensor> contents = reader_(run);
  note_training();  // the first read of all places the model, which calls hooks of the program
  return contents;
}

at::Tensor BodyCapture::look_at(const at::Tensor& tensor) {
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

}  // namespace smp::runtime
