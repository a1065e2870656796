// Devices that are loaded when a rank asks for them: a rank on the CPU stays small, and builds and starts where there is no
// driver.
#pragma once

#include "runtime/device/device.h"

namespace smp::runtime {

/// Whether this machine has a driver and a GPU that this process may use (CUDA_VISIBLE_DEVICES). Loads the driver alone.
bool has_gpu();

/// CUDA by LibTorch, which asks for it by itself, too, at the first call that has to do with CUDA. Loads libsmp_cuda.so,
/// which lies where the program finds its libraries, and with it LibTorch's CUDA part (250 MB of the process). Throws
/// c10::Error where there is no driver or no GPU, or smp was built without CUDA, and loads nothing more then; and where the
/// driver is too old.
const Device& cuda_device();

}  // namespace smp::runtime
