// Checked products and sums.
#include "partitioner/graph/tensor_bytes.h"

#include <algorithm>

namespace smp::partitioner {

std::optional<int64_t> dense_bytes(std::span<const int64_t> sizes, c10::ScalarType dtype) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool is_empty = false;
  for (const int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
    is_empty = is_empty || size == 0;
  }
  return is_empty ? 0 : bytes;
}

std::optional<int64_t> extent_bytes(std::span<const int64_t> sizes, std::span<const int64_t> strides, c10::ScalarType dtype,
                                    int64_t storage_offset) {
  const std::optional<int64_t> dense = dense_bytes(sizes, dtype);
  const auto is_negative = [](int64_t number) { return number < 0; };
  if (!dense || strides.size() != sizes.size() || storage_offset < 0) return std::nullopt;
  if (std::any_of(strides.begin(), strides.end(), is_negative)) return std::nullopt;
  if (*dense == 0) return 0;
  int64_t end = 0, bytes = 0;  // in elements, in bytes
  bool overflows = __builtin_add_overflow(storage_offset, 1, &end);
  for (size_t d = 0; d < sizes.size() && !overflows; ++d) {
    int64_t step = 0;
    overflows = __builtin_mul_overflow(sizes[d] - 1, strides[d], &step) || __builtin_add_overflow(end, step, &end);
  }
  if (overflows || __builtin_mul_overflow(end, static_cast<int64_t>(c10::elementSize(dtype)), &bytes)) return std::nullopt;
  return bytes;
}

}  // namespace smp::partitioner
