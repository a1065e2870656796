// Which kind of device, and which one of its kind.
#include "smp/engine/context/rank_device.h"

#include <c10/util/Exception.h>

#include <string>

#include "runtime/device/device.h"
#include "runtime/device/loaded_devices.h"

namespace smp::engine {
namespace {

const runtime::Device& device_for(DeviceKind kind, const Logger& logger) {
  if (kind == DeviceKind::kCuda) return runtime::cuda_device();
  if (kind == DeviceKind::kCpu || !runtime::has_gpu()) return runtime::host();
  try {
    return runtime::cuda_device();
  } catch (const c10::Error& error) {
    logger.warning(std::string("this machine has a GPU, and device=auto computes on the CPU: ") +
                   error.what_without_backtrace());
    return runtime::host();
  }
}

constexpr char kFound = '+', kFailed = '-';

}  // namespace

int take_device(const Config& config, const runtime::Launch& launch, runtime::Transport& world, const Logger& logger) {
  const runtime::Device* found = nullptr;
  std::string own;
  try {
    found = &device_for(config.device, logger);
    own = kFound + c10::DeviceTypeName(found->type, /*lower_case=*/true);
  } catch (const c10::Error& error) {
    own = kFailed + std::string(error.what_without_backtrace());
  }
  const std::vector<std::string> all = world.all_gather(own);
  for (size_t r = 0; r < all.size(); ++r) {
    TORCH_CHECK(all[r].at(0) != kFailed, "smp::init: rank ", r, ": ", all[r].substr(1));
    TORCH_CHECK(all[r] == all[0], "smp::init: expected one kind of device on all ranks, got ", all[0].substr(1),
                " on rank 0 and ", all[r].substr(1), " on rank ", r,
                ". Set device to \"cpu\", or start on machines with GPUs alone.");
  }
  runtime::use_device(*found);
  const int count = found->count(), index = launch.local_rank % count;
  found->use(index);
  if (found->type != runtime::host().type && launch.local_size > count && launch.local_rank == 0) {
    logger.warning("expected a GPU for each of the " + std::to_string(launch.local_size) + " ranks of this host, got " +
                   std::to_string(count) + ": ranks share them, and wait for each other. Start as many ranks as GPUs (-np " +
                   std::to_string(count) + ").");
  }
  return index;
}

}  // namespace smp::engine
