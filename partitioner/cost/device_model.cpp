// The roofline.
#include "partitioner/cost/device_model.h"

#include <algorithm>

namespace smp::partitioner {
namespace {

double kernels_us(const DeviceModel& device, const Work& work) {
  const double products_us = work.flops / (device.peak_gflops * 1e3) + work.half_flops / (device.half_gflops * 1e3);
  const double memory_us = work.bytes / (device.memory_gigabytes_per_s * 1e3);
  const double functions_us = (work.transcendentals * device.transcendental_ns + work.randoms * device.random_ns) / 1e3;
  return std::max(products_us, memory_us) + functions_us;
}

}  // namespace

double DeviceModel::forward_us(const Work& work) const {
  return kernels_us(*this, work) + work.kernels * forward_overhead_us;
}

double DeviceModel::backward_us(const Work& work) const {
  return kernels_us(*this, work) + work.kernels * backward_overhead_us;
}

double DeviceModel::message_us(int64_t num_bytes) const {
  return link_latency_us + static_cast<double>(num_bytes) / (link_gigabytes_per_s * 1e3);
}

}  // namespace smp::partitioner
