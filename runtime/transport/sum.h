// Owns the element types that all_reduce_sum takes, and their sums.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace smp::runtime {

/// Throws c10::TypeError for other types than Float, Double, Long, BFloat16 and Half,
/// c10::ValueError for a negative number.
void check_sum(int64_t num_elements, c10::ScalarType type);

/// Writes the elementwise sum, in the order of `buffers`, to each of them. 16-bit types are summed
/// in float32 and rounded once.
void sum_into_all(const std::vector<void*>& buffers, int64_t num_elements, c10::ScalarType type);

/// 16-bit floats as float32 and, rounded, back.
std::vector<float> widen(const void* data, int64_t num_elements, c10::ScalarType type);
void narrow(const std::vector<float>& values, void* data, c10::ScalarType type);

}  // namespace smp::runtime
