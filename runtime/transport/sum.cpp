// Owns the loops behind runtime/transport/sum.h.
#include "runtime/transport/sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>

namespace smp::runtime {
namespace {

template <class Element, class Sum>
void sum_elements(const std::vector<void*>& buffers, int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    auto sum = static_cast<Sum>(static_cast<const Element*>(buffers[0])[i]);
    for (size_t b = 1; b < buffers.size(); ++b)
      sum += static_cast<Sum>(static_cast<const Element*>(buffers[b])[i]);
    for (void* buffer : buffers) static_cast<Element*>(buffer)[i] = static_cast<Element>(sum);
  }
}

template <class Element>
std::vector<float> widen_elements(const void* data, int64_t num_elements) {
  const auto* first = static_cast<const Element*>(data);
  return {first, first + num_elements};
}

template <class Element>
void narrow_elements(const std::vector<float>& values, void* data) {
  std::transform(values.begin(), values.end(), static_cast<Element*>(data),
                 [](float value) { return static_cast<Element>(value); });
}

}  // namespace

void check_sum(int64_t num_elements, c10::ScalarType type) {
  using c10::ScalarType;
  const bool is_known = type == ScalarType::Float || type == ScalarType::Double ||
                        type == ScalarType::Long || type == ScalarType::BFloat16 ||
                        type == ScalarType::Half;
  TORCH_CHECK_TYPE(is_known, "all_reduce_sum: expected Float, Double, Long, BFloat16 or Half, got ",
                   type, ". Convert the tensor before the call.");
  TORCH_CHECK_VALUE(num_elements >= 0, "all_reduce_sum: expected at least 0 elements, got ",
                    num_elements, ".");
}

void sum_into_all(const std::vector<void*>& buffers, int64_t num_elements, c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return sum_elements<float, float>(buffers, num_elements);
    case c10::ScalarType::Double:
      return sum_elements<double, double>(buffers, num_elements);
    case c10::ScalarType::Long:
      return sum_elements<int64_t, int64_t>(buffers, num_elements);
    case c10::ScalarType::BFloat16:
      return sum_elements<c10::BFloat16, float>(buffers, num_elements);
    case c10::ScalarType::Half:
      return sum_elements<c10::Half, float>(buffers, num_elements);
    default:
      TORCH_INTERNAL_ASSERT(false, "check_sum let pass ", type);
  }
}

std::vector<float> widen(const void* data, int64_t num_elements, c10::ScalarType type) {
  return type == c10::ScalarType::Half ? widen_elements<c10::Half>(data, num_elements)
                                       : widen_elements<c10::BFloat16>(data, num_elements);
}

void narrow(const std::vector<float>& values, void* data, c10::ScalarType type) {
  return type == c10::ScalarType::Half ? narrow_elements<c10::Half>(values, data)
                                       : narrow_elements<c10::BFloat16>(values, data);
}

}  // namespace smp::runtime
