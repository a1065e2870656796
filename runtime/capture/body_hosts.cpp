// Tensors that a body has brought to the CPU: their content is real, and operators on them are both run and recorded, so
// that a body may print them, look at them through pointers, or go on computing with them.
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "runtime/capture/body_capture.h"

namespace smp::runtime {

bool asks_for_host_copy(const OperatorInfo& info, const torch::jit::Stack& stack) {
  if (!info.copies_to_device) return false;
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  return std::any_of(stack.begin() + static_cast<ptrdiff_t>(first), stack.end(),
                     [](const c10::IValue& argument) { return argument.isDevice() && argument.toDevice().is_cpu(); });
}

namespace {

/// Calls `replace` for each tensor in `value`, lists included.
void map_tensors(c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? replace(tensor) : tensor);
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(replace(*tensor)) : tensor);
    }
    value = std::move(list);
  }
}

}  // namespace

at::Tensor BodyCapture::ghost_of(const at::Tensor& tensor) const {
  for (const HostTensor& host : hosts_) {
    if (host.real.is_same(tensor)) return host.ghost;
  }
  return tensor;
}

at::Tensor BodyCapture::host_of(const at::Tensor& ghost) {
  if (!ghost.is_meta()) return ghost;
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  hosts_.push_back({read({ghost}).front(), ghost});
  return hosts_.back().real;
}

// Replaces host tensors among the arguments by their ghosts. Returns the arguments as they were if the operator can run on
// them: none is a ghost, or a parameter, whose content may be elsewhere.
std::optional<torch::jit::Stack> BodyCapture::take_ghosts(const OperatorInfo& info, torch::jit::Stack& stack) {
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  bool is_real = true, has_host = false;
  torch::jit::Stack real(stack.begin() + static_cast<ptrdiff_t>(first), stack.end());
  for (size_t i = first; i < stack.size(); ++i) {
    map_tensors(stack[i], [&](const at::Tensor& tensor) {
      at::Tensor ghost = ghost_of(tensor);
      const bool is_host = !ghost.is_same(tensor);
      has_host = has_host || is_host;
      is_real = is_real && (is_host || (!tensor.is_meta() && bindings_.find_storage(tensor) == nullptr));
      return ghost;
    });
  }
  if (!has_host || !is_real) return std::nullopt;
  return real;
}

void BodyCapture::call_with_hosts(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OperatorInfo& info = operator_info(op);
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  std::optional<torch::jit::Stack> real = take_ghosts(info, stack);
  if (real) {
    const at::NoGradGuard no_grad;
    op.callBoxed(*real);
    if (info.kind != OperatorClass::kRecorded) {  // a question about values that are here
      stack.resize(first);
      stack.insert(stack.end(), real->begin(), real->end());
      return;
    }
  }
  record_or_match(op, stack);
  if (!real) return;
  std::vector<at::Tensor> ghosts;
  for (size_t i = first; i < stack.size(); ++i) {
    map_tensors(stack[i], [&](const at::Tensor& ghost) {
      ghosts.push_back(ghost);
      return ghost;
    });
  }
  size_t next = 0;
  for (size_t i = first; i < stack.size(); ++i) {
    stack[i] = (*real)[i - first];
    map_tensors(stack[i], [&](const at::Tensor& tensor) {
      const at::Tensor& ghost = ghosts.at(next++);
      const bool is_known = std::any_of(hosts_.begin(), hosts_.end(), [&](const auto& host) { return host.real.is_same(tensor); });
      if (!is_known) hosts_.push_back({tensor, ghost});
      return tensor;
    });
  }
}

}  // namespace smp::runtime
