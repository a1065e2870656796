// Operator calls on ghosts.
#include "runtime/capture/ghost_calls.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/capture/meta/meta_kernels.h"
#include "runtime/capture/opaque.h"
#include "runtime/capture/operator_info.h"
#include "runtime/capture/places.h"
#include "runtime/device/device.h"
#include "runtime/libtorch/boxed_tensors.h"

namespace smp::runtime {
namespace {

// smp::opaque runs the user's code, and one_hot looks at its values unless it is on meta.
bool may_be_taken_apart(const std::string_view name) { return name.starts_with("aten::") && name != "aten::one_hot"; }

bool writes(const OperatorInfo& info) {
  return std::find(info.argument_written.begin(), info.argument_written.end(), true) != info.argument_written.end();
}

// What stands for a real tensor, which operators that return their argument (to, contiguous) give back, stands for no ghost.
at::Tensor copy_of(const at::Tensor& stand_in) {
  const at::AutoGradMode with_grad(true);
  return stand_in.alias();
}

}  // namespace

void GhostCalls::operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto on_host = [this](const at::Tensor& seen) { return stays_on_host(seen); };
  if (may_be_taken_apart(op.operator_name().name) && autocast_casts(stack, op.schema().arguments().size(), on_host)) {
    for (const auto key : {this_ranks_device().autocast, c10::DispatchKey::CompositeImplicitAutograd}) {
      if (op.hasKernelForDispatchKey(key)) return take_apart(op, key, stack);
    }
  }
  call_on_stand_ins(op, stack);
}

// It is on the host yet, and on the rank's device when the call is run.
bool GhostCalls::comes_to_device(const at::Tensor& seen) const {
  return !is_on_this_ranks_device(seen) && bindings_.find_storage(seen) != nullptr;
}

bool GhostCalls::stays_on_host(const at::Tensor& seen) const {
  return seen.device().type() == host().type && !comes_to_device(seen);
}

void GhostCalls::take_apart(const c10::OperatorHandle& op, c10::DispatchKey key, torch::jit::Stack& stack) {
  const OperatorInfo& info = operator_info(op);
  const auto begin = stack.end() - static_cast<ptrdiff_t>(info.num_arguments);
  const std::vector<c10::IValue> originals(begin, stack.end());
  for (auto argument = begin; argument != stack.end(); ++argument) {  // autocast casts what is on the device
    map_tensors(*argument, [this](const at::Tensor& seen) {
      return as_ghost(seen) == nullptr && comes_to_device(seen) ? tensors_.ghost_of(copy_of(tensors_.stand_in_of(seen)))
                                                                : seen;
    });
  }
  {
    const AssumedValues assumed(op, stack);
    const UncachedCasts uncached;
    const InterceptWithin scope(*this);
    op.callBoxedForDispatchKey(key, stack);
  }
  const size_t first = stack.size() - info.returned_argument.size();
  for (size_t r = 0; r < info.returned_argument.size(); ++r) {
    if (info.returned_argument[r] >= 0) {
      stack[first + r] = originals[static_cast<size_t>(info.returned_argument[r])];
      continue;
    }
    map_tensors(stack[first + r], [this](const at::Tensor& made) {
      return as_ghost(made) != nullptr ? made : tensors_.ghost_of(copy_of(tensors_.stand_in_of(made)));
    });
  }
}

void GhostCalls::call_on_stand_ins(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OperatorInfo& info = operator_info(op);
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  const std::vector<c10::IValue> originals(stack.begin() + static_cast<ptrdiff_t>(first), stack.end());
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // what the caller sees, and what stands for it
  for (size_t i = first; i < stack.size(); ++i) {
    map_tensors(stack[i], [&](const at::Tensor& seen) {
      pairs.emplace_back(seen, tensors_.stand_in_of(seen));
      return pairs.back().second;
    });
  }
  for (size_t i = 0; i < info.argument_is_device.size(); ++i) {
    c10::IValue& argument = stack[first + i];
    if (info.argument_is_device[i] && (argument.isDevice() || pairs.empty())) argument = c10::Device(c10::kMeta);
  }
  std::vector<const Device*> devices;  // of inputs
  std::vector<at::Tensor> inputs;
  for (const auto& [seen, stand_in] : pairs) {
    devices.push_back(stays_on_host(seen) ? &host() : &this_ranks_device());
    inputs.push_back(seen);
  }
  {
    const OpaqueInputsOn on(devices, inputs);
    call_on_meta(op, stack);
  }
  for (size_t r = 0; r < info.returned_argument.size(); ++r) {
    if (info.returned_argument[r] >= 0) {
      stack[first + r] = originals[static_cast<size_t>(info.returned_argument[r])];
      continue;
    }
    map_tensors(stack[first + r], [&](const at::Tensor& made) {
      for (const auto& [seen, stand_in] : pairs) {
        if (stand_in.is_same(made)) return as_ghost(seen) != nullptr ? seen : tensors_.ghost_of(copy_of(made));
      }
      return tensors_.ghost_of(made);
    });
  }
  if (!writes(info)) return;
  for (const auto& [seen, stand_in] : pairs) {
    const Ghost* ghost = as_ghost(seen);
    if (ghost == nullptr) continue;
    if (!same_geometry(seen, spec_of(stand_in))) {
      seen.unsafeGetTensorImpl()->set_sizes_and_strides(stand_in.sizes(), stand_in.strides(), stand_in.storage_offset());
    }
    if (ghost->value == partitioner::kNoValue)
      set_gradient(seen, stand_in.requires_grad(), tensors_.run());  // within a composite
  }
}

}  // namespace smp::runtime
