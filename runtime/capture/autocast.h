// Gives ghosts the dtypes that CPU autocast gives data. Owns no policy: LibTorch's own autocast kernels decide.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace smp::runtime {

/// call_on_meta, as the thread's autocast would have it on the CPU. LibTorch casts no meta tensor, so its autocast
/// kernels are shown stand-ins that look like CPU tensors, and what they cast is cast on meta. Composites are taken
/// apart for that, as autocast meets their parts. Without autocast the same as call_on_meta.
void call_on_ghosts(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace smp::runtime
