// Rows of data sheets, and what of them training reaches.
#include "partitioner/cost/device_table.h"

#include <array>

namespace smp::partitioner {
namespace {

constexpr std::array<KnownDevice, 16> kDevices{{
    {"B200", 178, 75, 1100, 2250, 7700, 900},
    {"H200", 139, 67, 494, 989, 4800, 450},
    {"H100", 79, 67, 494, 989, 3350, 450},
    {"H100 PCIe", 79, 51, 378, 756, 2000, 64},
    {"H100 NVL", 93, 60, 417, 835, 3900, 64},
    {"A100", 79, 19.5, 156, 312, 2039, 300},
    {"A100 80GB PCIe", 79, 19.5, 156, 312, 1935, 32},
    {"A100-SXM4-40GB", 39, 19.5, 156, 312, 1555, 300},
    {"A100-PCIE-40GB", 39, 19.5, 156, 312, 1555, 32},
    {"L40S", 44, 91.6, 183, 362, 864, 32},
    {"L4", 22, 30.3, 60, 121, 300, 32},
    {"V100", 15, 15.7, 15.7, 125, 900, 150},
    {"V100-SXM2-32GB", 31, 15.7, 15.7, 125, 900, 150},
    {"V100-PCIE-32GB", 31, 14, 14, 112, 900, 16},
    {"T4", 14, 8.1, 8.1, 65, 320, 16},
    {"RTX 4090", 23, 82.6, 82.6, 165, 1008, 32},
}};

bool is_beginning(std::string_view words, std::string_view name) {
  if (!name.starts_with(words)) return false;
  return name.size() == words.size() || name[words.size()] == ' ' || name[words.size()] == '-';
}

}  // namespace

const KnownDevice* find_known_device(std::string_view name) {
  const size_t length = name.size();
  for (const std::string_view maker : {"NVIDIA ", "Tesla ", "GeForce "}) {
    if (name.starts_with(maker)) name.remove_prefix(maker.size());
  }
  for (const std::string_view other : {" MIG ", " Laptop ", " Max-Q"}) {  // less of the same
    if (name.find(other) != std::string_view::npos) return nullptr;
  }
  const bool is_of_driver = name.size() < length;
  const KnownDevice* found = nullptr;
  for (const KnownDevice& device : kDevices) {
    if (!is_of_driver && device.name != name) continue;
    if (is_beginning(device.name, name) && (found == nullptr || device.name.size() > found->name.size())) found = &device;
  }
  return found;
}

const KnownDevice& usual_device() { return *find_known_device("A100"); }

std::string known_device_names() {
  std::string names;
  for (const KnownDevice& device : kDevices) names.append(names.empty() ? "" : ", ").append(device.name);
  return names;
}

// The shares, and what a kernel costs at least, fit an H100 on the two models of benchmarks/gpu (planned_device_test).
DeviceModel device_model(const KnownDevice& device, const DeviceUse& use) {
  constexpr double kProducts = 0.55, kMemory = 0.6, kLink = 0.8;
  constexpr double kByHostGigabytesPerS = 10, kByHostUs = 40, kDirectUs = 15;
  const double kernel_us = use.graphs ? 2.7 : 11;
  const double float_tflops = use.tf32 ? device.tf32_tflops : device.float_tflops;
  return {.peak_gflops = kProducts * float_tflops * 1e3,
          .half_gflops = kProducts * device.half_tflops * 1e3,
          .memory_gigabytes_per_s = kMemory * device.memory_gigabytes_per_s,
          .transcendental_ns = 0,  // hidden behind memory
          .random_ns = 0,
          .forward_overhead_us = kernel_us,
          .backward_overhead_us = kernel_us,
          .body_us = 0,  // the host is ahead
          .link_gigabytes_per_s = use.direct ? kLink * device.link_gigabytes_per_s : kByHostGigabytesPerS,
          .link_latency_us = use.direct ? kDirectUs : kByHostUs,
          .allocation_bytes = 512};  // of LibTorch's caching allocator
}

}  // namespace smp::partitioner
