// Owns the choice of what a rank computes on.
#pragma once

#include <string>

#include "runtime/device/links.h"
#include "runtime/launch/launch.h"
#include "runtime/transport/transport.h"
#include "smp/config.h"
#include "smp/engine/context/log.h"

namespace smp::engine {

struct RankDevice {
  int index = 0;  // among those of its kind
  /// Between devices, each of one rank; null where messages go by way of the host.
  const runtime::DeviceLinks* links = nullptr;
  std::string model{};  // of world rank 0's; empty: ranks compute on the CPU
  bool tf32 = false;    // as world rank 0 has set it for products, where plans are made for a GPU
};

/// What this rank has found of what it is asked for.
struct FoundDevice {
  const runtime::Device* device = nullptr;  // null: none
  std::string why_none{};
};

/// Makes the device that `config` asks for this rank's, and the one of its local rank LibTorch's current one of this thread.
/// Collective. Throws c10::Error on all ranks where one has no such device, with
/// what it lacks, or where "auto" finds different kinds on them.
RankDevice take_device(const Config& config, const runtime::Launch& launch, runtime::Transport& world, const Logger& logger);
/// The same behind the search.
RankDevice settle_on(const FoundDevice& found, const Config& config, const runtime::Launch& launch,
                     runtime::Transport& world, const Logger& logger);

}  // namespace smp::engine
