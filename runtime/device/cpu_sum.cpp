// Loops of which the compiler makes vector instructions.
#include "runtime/device/cpu_sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <array>
#include <type_traits>

namespace smp::runtime {
namespace {

constexpr int64_t kBlock = 1024;  // sums under way; they stay in the first-level cache

/// `count`: a number, or a constant, for which the compiler makes vector instructions.
template <class Element, class Sum, class Count>
void sum_block(const std::vector<const void*>& terms, void* result, int64_t first, Count count) {
  std::array<Sum, kBlock> sums;
  const auto* begin = static_cast<const Element*>(terms.front()) + first;
  for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>(i)] = static_cast<Sum>(begin[i]);
  for (size_t t = 1; t < terms.size(); ++t) {
    const auto* term = static_cast<const Element*>(terms[t]) + first;
    for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>(i)] += static_cast<Sum>(term[i]);
  }
  auto* out = static_cast<Element*>(result) + first;
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Element>(sums[static_cast<size_t>(i)]);
}

template <class Element, class Sum>
void sum_elements(const std::vector<const void*>& terms, void* result, int64_t num_elements) {
  int64_t first = 0;
  for (; first + kBlock <= num_elements; first += kBlock) {
    sum_block<Element, Sum>(terms, result, first, std::integral_constant<int64_t, kBlock>());
  }
  sum_block<Element, Sum>(terms, result, first, num_elements - first);
}

}  // namespace

void sum_on_cpu(const std::vector<const void*>& terms, void* sum, int64_t num_elements, c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return sum_elements<float, float>(terms, sum, num_elements);
    case c10::ScalarType::Double:
      return sum_elements<double, double>(terms, sum, num_elements);
    case c10::ScalarType::Long:
      return sum_elements<int64_t, int64_t>(terms, sum, num_elements);
    case c10::ScalarType::BFloat16:
      return sum_elements<c10::BFloat16, float>(terms, sum, num_elements);
    case c10::ScalarType::Half:
      return sum_elements<c10::Half, float>(terms, sum, num_elements);
    default:
      TORCH_INTERNAL_ASSERT(false, "expected a type that sums are made of, got ", type);
  }
}

}  // namespace smp::runtime
