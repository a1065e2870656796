// Where the tensors of a body are when the stages run its operators: on the rank's device or on the host.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "runtime/capture/bindings.h"
#include "runtime/capture/operator_info.h"
#include "runtime/device/device.h"

namespace smp::runtime {

/// The results of this operator that are memory of their own, as LibTorch decides it: by the device that the call names,
/// else by its tensors. The arguments are last on the stack; parameters and buffers are on the rank's device there, wherever
/// they are yet.
const Device& device_of_results(const OperatorInfo& info, const torch::jit::Stack& stack, const Bindings& bindings);

/// What to call for `op`, so that to() and type_as() copy where they go from one device to another: on the stand-ins of
/// ghosts, which are all on one device, they would give back their argument.
const c10::OperatorHandle& copying_between_devices(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                                                   const Bindings& bindings);

}  // namespace smp::runtime
