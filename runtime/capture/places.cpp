// Refusal texts and ambient modes.
#include "runtime/capture/places.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/device/device.h"
#include "runtime/libtorch/boxed_tensors.h"

namespace smp::runtime {

std::string describe_place(const std::string& op, const std::string& module) {
  if (module.empty()) return op + ", before any parameter was used";
  return op + ", in or after " + (module == kRootModule ? "the root module" : "module '" + module + "'");
}

const std::string& module_in_texts(const partitioner::Graph& graph, partitioner::ValueId num_values,
                                   const std::string& module) {
  const auto end = graph.values.begin() + num_values;
  return module.empty() && std::any_of(graph.values.begin(), end, partitioner::is_named) ? kRootModule : module;
}

void refuse_value_read(const std::string& op, const std::string& module) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, describe_place(op, module),
      ": the value of a tensor was read while the step body is captured. Expected operators only: the body runs on ghosts, "
      "which have no data. Return the tensor from the body and read it from the StepOutput, pass the value as an argument "
      "of the step, or replace the branch by torch::where.");
}

void refuse_data_dependent_shape(const std::string& op, const std::string& module) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, describe_place(op, module),
                              ": the shape of its result depends on data, which a captured graph cannot hold. Compute it "
                              "outside of the step and pass it as an argument, use torch::where with a mask, or call code "
                              "whose results have the same sizes for all data through smp::opaque.");
}

void refuse_replaced_data(const std::string& op, const std::string& module) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, describe_place(op, module),
                              ": expected operators that compute tensors, got one that replaces the data of an existing "
                              "tensor (set_data, set_). Write into it with copy_ instead.");
}

void refuse_nested(const std::string& op, const std::string& module) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, describe_place(op, module),
      ": expected tensors of one size each, got a nested tensor, whose parts have sizes of their own. "
      "Pad the parts to one size, and mask what is padding, or call code that needs them, from padded "
      "tensors to padded tensors, through smp::opaque.");
}

void refuse_forward_mode(const std::string& module) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, describe_place("aten::_make_dual", module),
      ": expected operators that stages can run later, got a dual tensor of forward-mode "
      "differentiation, whose level ends with the body. Call code that needs it through smp::opaque; "
      "in Python torch.func.jvp goes.");
}

void refuse_stale_ghost(const std::string& place, const std::string& module) {
  TORCH_CHECK(false, describe_place(place, module),
              ": got a ghost of an earlier run of the body, kept in a variable or module member. Expected tensors of this "
              "run, parameters, buffers or arguments. To carry state from step to step return it from the body and pass "
              "StepOutput::concat() to the next step, or copy_ it into a registered buffer. A mask or table that forward "
              "makes on its first call and keeps: make it in the constructor, or in every call.");
}

void refuse_other_arithmetic(const std::string& changed, const std::string& place) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, place, ": the step body has changed ", changed,
                              ", with which LibTorch computes in the whole process. Expected a body that leaves it "
                              "alone: stages run later, all operators with the setting of the program around the step. Set "
                              "it before the step, or call what needs it through smp::opaque.");
}

partitioner::Autocast current_autocast() {
  if (!at::autocast::is_autocast_enabled(this_ranks_device().type)) return {};
  return {.enabled = true, .dtype = at::autocast::get_autocast_dtype(this_ranks_device().type)};
}

bool autocast_casts(const torch::jit::Stack& stack, size_t num_arguments,
                    const std::function<bool(const at::Tensor&)>& is_on_host) {
  const Device& device = this_ranks_device();
  if (!current_autocast().enabled || c10::impl::tls_is_dispatch_key_excluded(device.autocast)) return false;
  if (device.type == host().type) return true;
  bool any_on_host = false, any_here = false;
  for (size_t i = stack.size() - num_arguments; i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](int, const at::Tensor& tensor) { (is_on_host(tensor) ? any_on_host : any_here) = true; });
  }
  return any_here || !any_on_host;
}

std::vector<at::Tensor> flatten_outputs(std::span<const c10::IValue> results) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& result : results) {
    if (result.isTensor()) {
      tensors.push_back(result.toTensor());
    } else if (result.isTensorList()) {
      for (const at::Tensor& tensor : result.toTensorVector()) tensors.push_back(tensor);
    }
  }
  return tensors;
}

UncachedCasts::UncachedCasts() : was_enabled_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(false);
}

UncachedCasts::~UncachedCasts() { at::autocast::set_autocast_cache_enabled(was_enabled_); }

const char* unseen_around_operators() {
  if (c10::impl::dispatch_mode_enabled()) return "a mode of Python's dispatcher (TorchDispatchMode)";
  if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty())
    return "hooks of saved tensors (torch.autograd.graph.saved_tensors_hooks)";
  return nullptr;
}

void set_modes(bool grad_enabled, const partitioner::Autocast& autocast) {
  if (at::GradMode::is_enabled() != grad_enabled) at::GradMode::set_enabled(grad_enabled);
  if (at::autocast::is_autocast_enabled(this_ranks_device().type) != autocast.enabled) {
    at::autocast::set_autocast_enabled(this_ranks_device().type, autocast.enabled);
  }
  if (autocast.enabled && at::autocast::get_autocast_dtype(this_ranks_device().type) != autocast.dtype) {
    at::autocast::set_autocast_dtype(this_ranks_device().type, autocast.dtype);
  }
}

AmbientModes::AmbientModes() : grad_enabled_(at::GradMode::is_enabled()), autocast_(current_autocast()) {}

AmbientModes::~AmbientModes() { set_modes(grad_enabled_, autocast_); }

}  // namespace smp::runtime
