// The standard library's hash of bytes (MurmurHash64A in libstdc++) over elements and geometry.
#include "runtime/stage/bit_digest.h"

#include <ATen/core/grad_mode.h>

#include <functional>
#include <string_view>

#include "runtime/device/device.h"

namespace smp::runtime {

uint64_t bit_digest(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  const at::NoGradGuard no_grad;
  uint64_t digest = 1;
  const auto mix = [&digest](uint64_t more) { digest = (digest ^ more) * 0x9e3779b97f4a7c15ULL + (digest >> 29); };
  mix(static_cast<uint64_t>(tensor.scalar_type()));
  for (const int64_t size : tensor.sizes()) mix(static_cast<uint64_t>(size));
  for (const int64_t stride : tensor.strides()) mix(static_cast<uint64_t>(stride));
  mix(tensor.is_conj()), mix(tensor.is_neg());
  at::Tensor once = tensor;  // an expanded one, without its repetitions
  for (int64_t d = tensor.dim(); d-- > 0;) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 0) once = once.select(d, 0);
  }
  const at::Tensor dense = once.is_non_overlapping_and_dense() ? once : once.contiguous();
  if (dense.nbytes() > 0) mix(std::hash<std::string_view>{}(bytes_of(dense.to(host().type))));
  return digest;
}

}  // namespace smp::runtime
