// smp was built without NCCL.
#include "runtime/device/cuda/nccl_links.h"

namespace smp::runtime {

const DeviceLinks* nccl_links() { return nullptr; }

}  // namespace smp::runtime
