// Meta kernels of Fourier transforms and pairwise distances.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <numeric>

#include "runtime/capture/meta/meta_kernels_table.h"

namespace smp::runtime::meta {
namespace {

using at::DimVector;
using at::IntArrayRef;
using at::Tensor;

void sort_by_falling_stride(const Tensor& self, DimVector::iterator first, DimVector::iterator last) {
  const auto strides = self.strides();
  std::sort(first, last, [&](int64_t left, int64_t right) { return strides[left] > strides[right]; });
}

/// MKL transforms one collapsed batch, so its result is laid out batch dimensions first, in the input's stride order, then
/// the transformed ones in the order of `dims`. Source: _exec_fft in aten/native/mkl/SpectralOps.cpp.
Tensor transformed(const Tensor& self, IntArrayRef sizes, IntArrayRef dims, at::ScalarType dtype) {
  if (!at::hasMKL()) return make(sizes, dtype);
  DimVector order(self.dim());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto is_batch = [&](int64_t dim) { return std::find(dims.begin(), dims.end(), dim) == dims.end(); };
  const auto batch_end = std::partition(order.begin(), order.end(), is_batch);
  sort_by_falling_stride(self, order.begin(), batch_end);
  std::copy(dims.begin(), dims.end(), batch_end);

  DimVector strides(self.dim());
  int64_t step = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    strides[*dim] = step;
    step *= std::max<int64_t>(sizes[*dim], 1);
  }
  return Tensor(at::detail::empty_strided_meta(sizes, strides, dtype));
}

DimVector sorted_dims(const Tensor& self, IntArrayRef dims, bool keeps_last) {
  DimVector sorted(dims);
  sort_by_falling_stride(self, sorted.begin(), sorted.end() - (keeps_last ? 1 : 0));
  return sorted;
}

Tensor fft_r2c(const Tensor& self, IntArrayRef dims, int64_t /*normalization*/, bool onesided) {
  DimVector sizes(self.sizes());
  if (onesided) sizes[dims.back()] = sizes[dims.back()] / 2 + 1;
  return transformed(self, sizes, sorted_dims(self, dims, /*keeps_last=*/true), c10::toComplexType(self.scalar_type()));
}

Tensor fft_c2c(const Tensor& self, IntArrayRef dims, int64_t /*normalization*/, bool /*forward*/) {
  if (dims.empty()) return make_like(self);
  return transformed(self, self.sizes(), sorted_dims(self, dims, /*keeps_last=*/false), self.scalar_type());
}

Tensor fft_c2r(const Tensor& self, IntArrayRef dims, int64_t normalization, int64_t last_dim_size) {
  // Several dimensions are transformed one after the other: complex ones first, the last one to real.
  const auto complex_dims = dims.slice(0, dims.size() - 1);
  const Tensor input = complex_dims.empty() ? self : fft_c2c(self, complex_dims, normalization, /*forward=*/false);
  DimVector sizes(self.sizes());
  sizes[dims.back()] = last_dim_size;
  return transformed(input, sizes, dims.slice(dims.size() - 1), c10::toRealValueType(self.scalar_type()));
}

/// x1: [..., p, d]; x2: [..., r, d]; result: [..., p, r].
Tensor cdist(const Tensor& x1, const Tensor& x2, double /*p*/, std::optional<int64_t> /*compute_mode*/) {
  TORCH_CHECK(x1.dim() >= 2 && x2.dim() >= 2 && x1.size(-1) == x2.size(-1),
              "cdist(): expected [..., p, d] and [..., r, d], got ", x1.sizes(), " and ", x2.sizes());
  auto sizes = at::infer_size_dimvector(x1.sizes().slice(0, x1.dim() - 2), x2.sizes().slice(0, x2.dim() - 2));
  sizes.push_back(x1.size(-2));
  sizes.push_back(x2.size(-2));
  return make(sizes, x1.scalar_type());
}

}  // namespace

void add_transforms(Table& table) {
  table.add("_fft_r2c", &fft_r2c);
  table.add("_fft_c2c", &fft_c2c);
  table.add("_fft_c2r", &fft_c2r);
  table.add("_cdist_forward", &cdist);
}

}  // namespace smp::runtime::meta
