// Where bytes lie. Owns none.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>

namespace smp::runtime {

/// Memory of a device: what a message is sent from or received into, or what a sum over ranks replaces. LibTorch's current
/// stream says when it is ready, so that a message needs no event of its own: a transport that reads memory of a device
/// with streams takes Device::record().
struct DeviceMemory {
  void* data = nullptr;
  int64_t num_bytes = 0;
  c10::DeviceType device = c10::DeviceType::CPU;
};

}  // namespace smp::runtime
