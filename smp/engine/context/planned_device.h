// Which device plans are made for.
#pragma once

#include <cstdint>

#include "partitioner/cost/device_model.h"
#include "smp/engine/context/context.h"

namespace smp::engine {

struct PlannedDevice {
  partitioner::DeviceModel model{};
  int64_t memory_bytes = -1;  // -1: not known, or not asked about
};

/// Config::planned_device, with its memory; else world rank 0's device.
PlannedDevice planned_device(const Context& context);

}  // namespace smp::engine
