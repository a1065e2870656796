// Owns the element types that all_reduce_sum takes, and their sums.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "runtime/device/memory.h"

namespace smp::runtime {

/// The number of elements of `terms`. Throws c10::TypeError for other types than Float, Double, Long, BFloat16 and Half,
/// c10::ValueError for a negative number and for memory that is not the host's.
int64_t check_sum(const DeviceMemory& terms, c10::ScalarType type);

/// Writes the elementwise sum of `terms`, added in their order, to `sum`, which may be one of them.
/// 16-bit types are summed in float32 and rounded once.
void sum_in_order(const std::vector<const void*>& terms, void* sum, int64_t num_elements, c10::ScalarType type);

}  // namespace smp::runtime
