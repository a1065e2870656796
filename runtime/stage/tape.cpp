// Prepares and runs tapes.
#include "runtime/stage/tape.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "runtime/device/device.h"
#include "runtime/libtorch/memory_tensor.h"
#include "runtime/stage/constant_calls.h"
#include "runtime/stage/lifetimes.h"
#include "runtime/stage/paced_progress.h"
#include "runtime/stage/remade_calls.h"
#include "runtime/stage/replay.h"
#include "runtime/stage/tape_order.h"
#include "runtime/stage/unused_calls.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

void choose_kernels(TapeLists& lists) {
  for (TapeCall& call : lists.calls) {
    if (call.kind == TapeCall::Kind::kOperator) call.kernel = own_kernel_of(call.op);
  }
}

void plan_frees(TapeLists& lists) {
  const Lifetimes lifetimes(lists.num_slots, lists.calls);
  // By slot: what leaves is taken out behind the calls.
  std::vector<bool> is_result(lists.num_slots, false), is_output(lists.num_slots, false);
  for (const int32_t slot : lists.outputs) is_output[static_cast<size_t>(slot)] = true;
  for (TapeBackward& backward : lists.backwards) {
    for_each_slot(backward.results, [&](int32_t slot) {
      is_result[static_cast<size_t>(slot)] = true;
      const bool stays = lifetimes.last[static_cast<size_t>(slot)] >= static_cast<int>(backward.results_end);
      if (!stays) backward.freed.push_back(slot);
    });
  }
  for (size_t n = 0; n < lists.calls.size(); ++n) {
    for (const int32_t slot : lifetimes.ends[n]) {
      const auto at = static_cast<size_t>(slot);
      if (is_result[at] && lifetimes.last[at] == static_cast<int>(n)) continue;
      const bool is_taken_out = n < lists.forward_end && is_output[at];
      (is_taken_out ? lists.freed : lists.calls[n].freed).push_back(slot);
    }
  }
  for (size_t slot = 0; slot < lists.num_slots; ++slot) {
    if (lifetimes.last[slot] < 0 && !is_result[slot]) lists.freed.push_back(static_cast<int32_t>(slot));
  }
}

// Fixed tensors that are no arguments but elements of lists.
std::vector<int32_t> read_fixed(const TapeLists& lists, const Slots& fixed) {
  std::vector<int32_t> slots;
  for (const TapeCall& call : lists.calls) {
    for_each_read(call, [&](int32_t slot) {
      if (fixed[static_cast<size_t>(slot)].defined()) slots.push_back(slot);
    });
  }
  return slots;
}

std::vector<size_t> saved_own(const TapeLists& lists, const Slots& fixed) {
  std::unordered_set<const c10::StorageImpl*> read;
  const auto note = [&read](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage()) read.insert(tensor.storage().unsafeGetStorageImpl());
  };
  for (size_t n = lists.forward_end; n < lists.calls.size(); ++n) {
    for (const c10::IValue& argument : lists.calls[n].arguments) {
      if (argument.isTensor()) note(argument.toTensor());
    }
    for_each_read(lists.calls[n], [&](int32_t slot) { note(fixed[static_cast<size_t>(slot)]); });
  }
  std::vector<size_t> saved;
  for (size_t i = 0; i < lists.own.size(); ++i) {
    const TapeOwn& own = lists.own[i];
    if (own.is_fixed && read.contains(own.tensor.storage().unsafeGetStorageImpl())) saved.push_back(i);
  }
  return saved;
}

}  // namespace

Tape::Tape(TapeLists recorded, const Graph& graph, bool folds_host_tensors, const Recomputation* recomputation)
    : graph_(graph), lists_(std::move(recorded)), fixed_(lists_.num_slots) {
  const bool is_on_cpu = this_ranks_device().type == host().type;
  if (!is_on_cpu) fold_constants(lists_, fixed_, folds_host_tensors);  // there a mask is soon made, and here it is sent over
  fold_views(lists_, fixed_);
  drop_unused(lists_);
  if (recomputation != nullptr) remake(lists_, fixed_, *recomputation);
  put_results_first(lists_);
  if (is_on_cpu) choose_kernels(lists_);
  plan_frees(lists_);
  read_fixed_ = read_fixed(lists_, fixed_);
  saved_own_ = saved_own(lists_, fixed_);
}

std::vector<int64_t> Tape::versions() const {
  std::vector<int64_t> versions;
  versions.reserve(saved_own_.size());
  for (const size_t i : saved_own_) versions.push_back(lists_.own[i].tensor._version());
  return versions;
}

void Tape::check_versions(const std::vector<int64_t>& of_forward) const {
  for (size_t k = 0; k < saved_own_.size(); ++k) {
    const TapeOwn& own = lists_.own[saved_own_[k]];
    TORCH_CHECK(own.tensor._version() == of_forward[k],
                "one of the variables needed for gradient computation has been modified by an inplace operation: '",
                graph_.values[static_cast<size_t>(own.value)].name, "' is at version ", own.tensor._version(),
                "; expected version ", of_forward[k],
                " instead. Write to it when the step has ended, or let the forward use a clone() of it.");
  }
}

const at::Tensor& Tape::at(const Slots& slots, int32_t slot) const {
  const at::Tensor& fixed = fixed_[static_cast<size_t>(slot)];
  return fixed.defined() ? fixed : slots[static_cast<size_t>(slot)];
}

std::vector<at::Tensor> Tape::forward(Slots& slots, std::vector<at::Tensor> inputs, const std::vector<at::Tensor>& own,
                                      const RunContext& context) {
  slots.resize(lists_.num_slots);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (lists_.inputs[i].slot >= 0) slots[static_cast<size_t>(lists_.inputs[i].slot)] = std::move(inputs[i]);
  }
  for (size_t i = 0; i < own.size(); ++i) {
    const TapeOwn& known = lists_.own[i];
    if (known.slot >= 0 && !known.is_fixed) slots[static_cast<size_t>(known.slot)] = own[i];
  }
  for (const int32_t slot : read_fixed_) slots[static_cast<size_t>(slot)] = fixed_[static_cast<size_t>(slot)];
  inputs.clear();
  {
    std::optional<UserRandomStateScope> user_state;
    if (lists_.has_random && context.graph == nullptr) user_state.emplace();
    run(slots, 0, lists_.forward_end, context, nullptr);
  }
  std::vector<at::Tensor> outputs;
  for (const int32_t slot : lists_.outputs) outputs.push_back(at(slots, slot));
  for (const int32_t slot : lists_.freed) slots[static_cast<size_t>(slot)].reset();
  return outputs;
}

namespace {

// The same numbers in another geometry; undefined where some elements of that share memory.
at::Tensor with_geometry(const at::Tensor& tensor, const TensorSpec& geometry) {
  const bool shares =
      std::any_of(geometry.strides.begin(), geometry.strides.end(), [](int64_t stride) { return stride == 0; });
  if (shares || !tensor.sizes().equals(geometry.sizes) || tensor.scalar_type() != geometry.dtype) return {};
  const auto element_bytes = static_cast<int64_t>(tensor.element_size());
  const at::Tensor memory = at::empty({extent_bytes(geometry) / element_bytes}, tensor.options());
  return memory.as_strided(geometry.sizes, geometry.strides, geometry.storage_offset).copy_(tensor);
}

}  // namespace

// Where the recording found a gradient, and of which layout, is part of the lists; only user code (smp::opaque) behind this
// tape gives others later.
void Tape::fit_roots(size_t index, std::vector<at::Tensor>& gradients) const {
  const at::NoGradGuard no_grad;
  const TapeBackward& backward = lists_.backwards[index];
  for (size_t i = 0; i < gradients.size(); ++i) {
    bool is_alike = backward.has_root[i] == gradients[i].defined();
    if (is_alike && backward.roots[i] >= 0 && !fits(gradients[i], backward.root_geometries[i])) {
      gradients[i] = with_geometry(gradients[i], backward.root_geometries[i]);
      is_alike = gradients[i].defined();
    }
    TORCH_CHECK(is_alike, "expected a gradient as in the microbatch that was recorded for a taped stage, ",
                backward.has_root[i] ? c10::str("of sizes ", at::IntArrayRef(backward.root_geometries[i].sizes),
                                                " and strides ", at::IntArrayRef(backward.root_geometries[i].strides))
                                     : std::string("none"),
                ", got another as root ", i, " of backward ", index,
                ". An smp::opaque region whose gradients change their form needs stage: autograd.");
  }
}

std::vector<at::Tensor> Tape::backward(Slots& slots, size_t index, std::vector<at::Tensor> gradients,
                                       const RunContext& context, const GradientSink& sink) {
  fit_roots(index, gradients);
  const TapeBackward& backward = lists_.backwards[index];
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (backward.roots[i] >= 0) slots[static_cast<size_t>(backward.roots[i])] = std::move(gradients[i]);
  }
  gradients.clear();
  const auto user_state = user_state_of(context);
  run(slots, index == 0 ? lists_.forward_end : lists_.backwards[index - 1].end, backward.results_end, context, &sink);
  std::vector<at::Tensor> results;
  for (const int32_t slot : backward.results) results.push_back(slot < 0 ? at::Tensor() : at(slots, slot));
  for (const int32_t slot : backward.freed) slots[static_cast<size_t>(slot)].reset();
  return results;
}

void Tape::weight_gradients(Slots& slots, const RunContext& context, const GradientSink& sink) {
  const TapeBackward& backward = lists_.backwards.back();
  const auto user_state = user_state_of(context);
  run(slots, backward.results_end, backward.end, context, &sink);
}

std::unique_ptr<UserRandomStateScope> Tape::user_state_of(const RunContext& context) const {
  return lists_.remakes_random && context.graph == nullptr ? std::make_unique<UserRandomStateScope>() : nullptr;
}

void Tape::run(Slots& slots, size_t begin, size_t end, const RunContext& context, const GradientSink* sink) {
  size_t n = begin;
  try {
    run_calls(slots, n, end, context, sink);
  } catch (c10::Error& error) {
    const Node& node = graph_.nodes[static_cast<size_t>(lists_.calls[n].node)];
    error.add_context((sink == nullptr ? "in " : "in the backward of ") +
                      describe_run(node.op, node.module, context.microbatch));
    throw;
  }
}

namespace {

// Work of the host is no part of a graph: its replays would find the numbers of the recording.
void check_drawn_on_device(const torch::jit::Stack& results) {
  for (const c10::IValue& result : results) {
    const bool is_on_host_alone = result.isTensor() && result.toTensor().defined() && is_on_host(result.toTensor());
    TORCH_CHECK(!is_on_host_alone, "random numbers that are drawn on the host");
  }
}

}  // namespace

void Tape::run_calls(Slots& slots, size_t& n, size_t end, const RunContext& context, const GradientSink* sink) {
  PacedProgress progress(context.progress);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowAutograd without_autograd;
  std::optional<GeneratorHold> seed;
  bool draws_in_graph = false;
  stack_.clear();
  for (; n < end; ++n) {
    const TapeCall& call = lists_.calls[n];
    if (call.kind == TapeCall::Kind::kOperator) {
      if (call.random_ordinal >= 0) {
        const auto ordinal = static_cast<uint64_t>(call.random_ordinal);
        if (context.graph == nullptr) {
          seed.emplace(context.random, ordinal, call.draws);
        } else {
          context.graph->seed(ordinal);
          draws_in_graph = true;
        }
      }
      if (call.grad_enabled != at::GradMode::is_enabled()) at::GradMode::set_enabled(call.grad_enabled);
      call.push(stack_, slots);
      call.kernel != nullptr ? call.kernel(call.op, stack_) : call.op.callBoxed(stack_);
      if (draws_in_graph) check_drawn_on_device(stack_);
      call.store(stack_, slots);
      if (call.ends_random) seed.reset(), draws_in_graph = false;
    } else {
      const auto source = static_cast<size_t>(call.tensors.front().slot);
      if (call.kind == TapeCall::Kind::kView) {
        slots[static_cast<size_t>(call.outputs.front())] = view_of(slots[source], call.geometry);
        for (const int32_t slot : call.freed) slots[static_cast<size_t>(slot)].reset();
      } else {
        at::Tensor gradient = slots[source];
        for (const int32_t slot : call.freed) slots[static_cast<size_t>(slot)].reset();
        (*sink)(static_cast<size_t>(call.parameter), std::move(gradient));
      }
    }
    if (context.timer) context.timer(call.node, sink != nullptr);
    progress();
  }
}

}  // namespace smp::runtime
