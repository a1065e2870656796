// The inputs of the meta sweep: the same geometry on the CPU and on meta.
#include "tests/unit/runtime/capture/meta/meta_kernels_test.h"

namespace smp::test {

Tensor Inputs::place(const Tensor& real) const {
  Tensor laid_out = real;
  if (layout == Layout::kChannelsLast && real.dim() == 4) {
    laid_out = real.contiguous(at::MemoryFormat::ChannelsLast);
  } else if (layout == Layout::kChannelsLast && real.dim() == 5) {
    laid_out = real.contiguous(at::MemoryFormat::ChannelsLast3d);
  } else if (layout == Layout::kTransposed && real.dim() >= 2) {
    laid_out = real.transpose(-1, -2).contiguous().transpose(-1, -2);
  }
  if (!device.is_cpu()) {
    laid_out = at::empty_strided(laid_out.sizes(), laid_out.strides(), laid_out.options().device(device));
  }
  // A clone, because a leaf could not be written to.
  if (requires_grad && laid_out.is_floating_point()) return laid_out.requires_grad_().clone();
  return laid_out;
}

Tensor Inputs::f(at::IntArrayRef sizes) const {
  const auto num_elements = c10::multiply_integers(sizes);
  return place((at::arange(num_elements, at::kDouble).remainder(7) / 10 + 0.1).to(dtype).view(sizes));
}

Tensor Inputs::i(at::IntArrayRef sizes, int64_t high) const {
  return place(at::arange(c10::multiply_integers(sizes), at::kLong).remainder(high).view(sizes));
}

Tensor Inputs::b(at::IntArrayRef sizes) const {
  return place(at::arange(c10::multiply_integers(sizes), at::kLong).remainder(2).to(at::kBool).view(sizes));
}

Tensor Inputs::c(at::IntArrayRef sizes) const {
  const auto type = dtype == at::kDouble ? at::kComplexDouble : at::kComplexFloat;
  return place(at::arange(c10::multiply_integers(sizes), at::kDouble).to(type).view(sizes));
}

Tensor Inputs::spd(int64_t size) const {
  return place((at::eye(size, at::kDouble) * 2 + at::full({size, size}, 0.1, at::kDouble)).to(dtype));
}

}  // namespace smp::test
