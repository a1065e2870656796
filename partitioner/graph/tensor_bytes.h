// What a tensor of given geometry takes, where the geometry comes from a message or a file and may be anything.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <span>

namespace smp::partitioner {

/// Of the elements without gaps. None for negative sizes, and where the product of the sizes, with 1 in place of 0 as
/// LibTorch computes strides, does not fit an int64: nobody may compute with such sizes.
std::optional<int64_t> dense_bytes(std::span<const int64_t> sizes, c10::ScalarType dtype);

/// From the start of the memory to the end of the last element; 0 without elements. None for what dense_bytes() refuses, for
/// negative strides and offsets, another number of strides than of sizes, and where the extent does not fit an int64.
std::optional<int64_t> extent_bytes(std::span<const int64_t> sizes, std::span<const int64_t> strides, c10::ScalarType dtype,
                                    int64_t storage_offset = 0);

/// The least multiple of `unit` that is not below `number`, which is not negative.
constexpr int64_t rounded_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

}  // namespace smp::partitioner
