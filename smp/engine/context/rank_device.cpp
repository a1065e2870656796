// Which kind of device, and which one of its kind.
#include "smp/engine/context/rank_device.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
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

RankDevice take_device(const Config& config, const runtime::Launch& launch, runtime::Transport& world,
                       const Logger& logger) {
  FoundDevice found;
  try {
    found.device = &device_for(config.device, logger);
  } catch (const c10::Error& error) {
    found.why_none = error.what_without_backtrace();
  }
  return settle_on(found, config, launch, world, logger);
}

RankDevice settle_on(const FoundDevice& own, const Config& config, const runtime::Launch& launch, runtime::Transport& world,
                     const Logger& logger) {
  const runtime::Device* const found = own.device;
  const std::vector<std::string> all =
      world.all_gather(found == nullptr ? kFailed + own.why_none : kFound + c10::DeviceTypeName(found->type, true));
  for (size_t r = 0; r < all.size(); ++r) {
    TORCH_CHECK(all[r].at(0) != kFailed, "smp::init: rank ", r, ": ", all[r].substr(1));
    TORCH_CHECK(all[r] == all[0], "smp::init: expected one kind of device on all ranks, got ", all[0].substr(1),
                " on rank 0 and ", all[r].substr(1), " on rank ", r,
                ". Set device to \"cpu\", or start on machines with GPUs alone.");
  }
  runtime::use_device(*found);
  RankDevice taken{.index = launch.local_rank % found->count()};
  if (found->type != runtime::host().type || !config.planned_device.empty()) {
    const bool own_tf32 =
        at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
    taken.tf32 = world.all_gather(own_tf32 ? "yes" : "no").front() == "yes";
  }
  found->use(taken.index);
  if (found->type == runtime::host().type) return taken;
  const runtime::DeviceLinks* const links = config.nccl ? found->links() : nullptr;
  const std::vector<std::string> identities = world.all_gather(found->identity()),
                                 can_link = world.all_gather(links != nullptr ? "yes" : "no");
  const size_t num_devices = std::set<std::string>(identities.begin(), identities.end()).size();
  if (num_devices < identities.size() && world.rank() == 0) {
    logger.warning("expected a GPU for each of " + std::to_string(identities.size()) + " ranks, got " +
                   std::to_string(num_devices) +
                   ": ranks share them, and wait for each other. Start as many ranks as GPUs on each host.");
  }
  taken.model = world.all_gather(found->model()).front();
  if (num_devices == identities.size() && std::count(can_link.begin(), can_link.end(), "no") == 0) taken.links = links;
  return taken;
}

}  // namespace smp::engine
