// What planning knows of kinds of devices without having one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "partitioner/cost/device_model.h"

namespace smp::partitioner {

/// One kind of GPU: what its maker's data sheet says, without sparsity.
struct KnownDevice {
  std::string_view name;
  int64_t memory_gibibytes;  // that CUDA shows
  double float_tflops, tf32_tflops, half_tflops;
  double memory_gigabytes_per_s;
  double link_gigabytes_per_s;  // to another one of the host, one way
};

/// By its own name ("H100"), or the one that its driver gives it ("NVIDIA H100 80GB HBM3"): the row whose name is the
/// longest beginning of what follows the maker's, in whole words. Null: none.
const KnownDevice* find_known_device(std::string_view name);
/// What stands in for a GPU that is in no row.
const KnownDevice& usual_device();
/// All names, with commas between them.
std::string known_device_names();

/// What decides how fast a device is beside its kind.
struct DeviceUse {
  bool tf32 = false;    // for products of 32-bit numbers
  bool graphs = true;   // a stage's operators are given to the device as a whole
  bool direct = false;  // messages go from device to device, not by way of the host
};
DeviceModel device_model(const KnownDevice& device, const DeviceUse& use);

}  // namespace smp::partitioner
