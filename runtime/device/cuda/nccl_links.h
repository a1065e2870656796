// Links between GPUs. Internal to the room.
#pragma once

#include "runtime/device/links.h"

namespace smp::runtime {

/// NCCL's; null where smp was built without it.
const DeviceLinks* nccl_links();

}  // namespace smp::runtime
