// Sums of the host's memory. Internal to the device room.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace smp::runtime {

/// What Device::sum_in_order promises.
void sum_on_cpu(const std::vector<const void*>& terms, void* sum, int64_t num_elements, c10::ScalarType type);

}  // namespace smp::runtime
