// The comparison of a tape with autograd.
#include "runtime/stage/tape_comparison.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "runtime/stage/bit_digest.h"
#include "runtime/stage/gradient_sum.h"

namespace smp::runtime {

using namespace partitioner;

TapeComparison::TapeComparison(AutogradStage& reference, Tape& tape, MicrobatchContext context,
                               const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> own)
    : reference_(reference),
      tape_(tape),
      context_(std::move(context)),
      own_(std::move(own)),
      own_values_(reference.own_values()) {
  const TapeLists& lists = tape.lists();
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs_.push_back(lists.inputs[i].is_written ? inputs[i].detach().clone() : inputs[i]);
  }
  for (size_t i = 0; i < own_.size(); ++i) {
    if (lists.own[i].is_written) written_.push_back({own_[i], own_[i].detach().clone()});
  }
}

TensorLookup TapeComparison::lookup() const {
  return [this](ValueId id) {
    const auto at = std::find(own_values_.begin(), own_values_.end(), id);
    return own_[static_cast<size_t>(at - own_values_.begin())];
  };
}

std::vector<at::Tensor> TapeComparison::forward(std::vector<at::Tensor> inputs) {
  auto outputs = reference_.forward(context_, std::move(inputs), lookup(), this);
  note_forward(outputs);
  return outputs;
}

std::vector<at::Tensor> TapeComparison::backward(size_t index, std::vector<at::Tensor> gradients) {
  roots_.push_back(gradients);
  auto results = reference_.backward(context_.microbatch, index, std::move(gradients));
  note_results(index, results);
  return results;
}

std::string TapeComparison::finish(const std::function<void()>& progress, std::vector<at::Tensor>& results) {
  is_comparing_ = true;
  run_tape(progress, results);
  const bool is_missing =
      std::any_of(expected_.begin(), expected_.end(), [](const auto& entry) { return !entry.second.empty(); });
  if (difference_.empty() && is_missing) difference_ = "the number of gradients";
  if (!difference_.empty()) run_autograd_again(results);
  return difference_;
}

bool TapeComparison::note(const std::string& what, const at::Tensor& tensor) {
  const uint64_t digest = bit_digest(tensor);
  std::deque<uint64_t>& expected = expected_[what];
  if (!is_comparing_) {
    expected.push_back(digest);
    return false;
  }
  const bool is_equal = !expected.empty() && expected.front() == digest;
  if (difference_.empty() && !is_equal) difference_ = "the " + what;
  if (is_equal) expected.pop_front();
  return difference_.empty();
}

void TapeComparison::note_forward(const std::vector<at::Tensor>& outputs) {
  const auto& values = reference_.values().outputs;
  for (size_t i = 0; i < outputs.size(); ++i) note("result of value " + std::to_string(values[i]), outputs[i]);
  for (const Written& written : written_) note("content of a written tensor", written.tensor);
}

void TapeComparison::note_results(size_t index, const std::vector<at::Tensor>& results) {
  const auto& values = reference_.values().backwards[index].results;
  for (size_t i = 0; i < results.size(); ++i) note("gradient of value " + std::to_string(values[i]), results[i]);
}

// Of autograd: none is added in the first run; in the second those that the tape has not given.
bool TapeComparison::gradient_made(ValueId parameter, const at::Tensor& gradient) {
  if (is_comparing_) return num_added_[parameter]-- <= 0;
  note("gradient of parameter value " + std::to_string(parameter), gradient);
  return false;
}

// Runs a forward once more on what it found, and leaves what it has written as the first run did.
void TapeComparison::repeat_forward(const std::function<void()>& forward) {
  const auto write = [this](const std::vector<at::Tensor>& contents) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < contents.size(); ++i) written_[i].tensor.variable_data().copy_(contents[i]);
  };
  std::vector<at::Tensor> before, after;
  for (const Written& written : written_) {
    before.push_back(written.before);
    after.push_back(written.tensor.detach().clone());
  }
  write(before);
  forward();
  write(after);
}

void TapeComparison::run_tape(const std::function<void()>& progress, std::vector<at::Tensor>& results) {
  const OperatorTimer untimed;
  const Tape::RunContext context{
      .random = context_.random, .microbatch = context_.microbatch, .progress = progress, .timer = untimed};
  Slots slots;
  repeat_forward([&] { note_forward(tape_.forward(slots, copied_inputs(), own_, context)); });
  for (size_t k = 0; k < roots_.size(); ++k) {
    const auto sink = [this](size_t own, at::Tensor gradient) {
      if (!note("gradient of parameter value " + std::to_string(own_values_[own]), gradient)) return;
      add_to_grad(own_[own], std::move(gradient));
      ++num_added_[own_values_[own]];
    };
    results = tape_.backward(slots, k, roots_[k], context, sink);
    note_results(k, results);
    if (k + 1 == roots_.size()) tape_.weight_gradients(slots, context, sink);
  }
}

void TapeComparison::run_autograd_again(std::vector<at::Tensor>& results) {
  if (roots_.empty()) return;
  results.clear();
  repeat_forward([&] { reference_.forward(context_, copied_inputs(), lookup(), this); });
  for (size_t k = 0; k < roots_.size(); ++k) results = reference_.backward(context_.microbatch, k, roots_[k]);
}

std::vector<at::Tensor> TapeComparison::copied_inputs() const {
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    inputs.push_back(tape_.lists().inputs[i].is_written ? inputs_[i].clone() : inputs_[i]);
  }
  return inputs;
}

}  // namespace smp::runtime
