// Meta kernels of reductions and small products. Their results are contiguous whatever the input's strides.
#include <ATen/WrapDimUtilsMulti.h>
#include <c10/util/irange.h>

#include <tuple>

#include "runtime/capture/meta/meta_kernels_table.h"

namespace smp::runtime::meta {
namespace {

using at::OptionalIntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

/// Sizes of `self` without `dims` (or with 1 in their place); no dims means all.
at::DimVector reduced_sizes(const Tensor& self, OptionalIntArrayRef dims, bool keepdim) {
  const bool all = !dims.has_value() || dims->empty();
  const auto is_reduced = at::dim_list_to_bitset(all ? at::IntArrayRef{} : *dims, self.dim());
  at::DimVector sizes;
  for (const auto dim : c10::irange(self.dim())) {
    if (!all && !is_reduced[dim]) {
      sizes.push_back(self.size(dim));
    } else if (keepdim) {
      sizes.push_back(1);
    }
  }
  return sizes;
}

/// Integers are summed in int64.
ScalarType accumulated_type(const Tensor& self, std::optional<ScalarType> dtype) {
  if (dtype.has_value()) return *dtype;
  return at::isIntegralType(self.scalar_type(), /*includeBool=*/true) ? at::kLong : self.scalar_type();
}

Tensor scalar(const Tensor& self) { return make({}, self.scalar_type()); }

Tensor extremum(const Tensor& self) {
  TORCH_CHECK(self.numel() > 0, "max(), min(): expected at least one element, got sizes ", self.sizes(),
              "; give the dim to reduce, or skip empty tensors");
  return scalar(self);
}

Tensor trace(const Tensor& self) { return make({}, accumulated_type(self, std::nullopt)); }

Tensor dot(const Tensor& self, const Tensor& other) {
  TORCH_CHECK(self.dim() == 1 && other.dim() == 1 && self.size(0) == other.size(0),
              "dot(): expected two 1-D tensors of one size, got ", self.sizes(), " and ", other.sizes());
  return scalar(self);
}

Tensor prod(const Tensor& self, std::optional<ScalarType> dtype) { return make({}, accumulated_type(self, dtype)); }

Tensor nansum(const Tensor& self, OptionalIntArrayRef dims, bool keepdim, std::optional<ScalarType> dtype) {
  return make(reduced_sizes(self, dims, keepdim), accumulated_type(self, dtype));
}

Tensor variance(const Tensor& self, OptionalIntArrayRef dims, const std::optional<Scalar>& /*correction*/, bool keepdim) {
  return make(reduced_sizes(self, dims, keepdim), c10::toRealValueType(self.scalar_type()));
}

std::tuple<Tensor, Tensor> variance_and_mean(const Tensor& self, OptionalIntArrayRef dims,
                                             const std::optional<Scalar>& correction, bool keepdim) {
  return {variance(self, dims, correction, keepdim), make(reduced_sizes(self, dims, keepdim), self.scalar_type())};
}

Tensor count_nonzero(const Tensor& self, at::IntArrayRef dims) {
  return make(reduced_sizes(self, dims, /*keepdim=*/false), at::kLong);
}

Tensor addbmm(const Tensor& self, const Tensor& batch1, const Tensor& batch2, const Scalar& /*beta*/,
              const Scalar& /*alpha*/) {
  TORCH_CHECK(batch1.dim() == 3 && batch2.dim() == 3 && batch1.size(0) == batch2.size(0) && batch1.size(2) == batch2.size(1),
              "addbmm(): expected batches [b, n, m] and [b, m, p], got ", batch1.sizes(), " and ", batch2.sizes());
  return make({batch1.size(1), batch2.size(2)}, self.scalar_type());
}

}  // namespace

void add_reductions(Table& table) {
  table.add("max", &extremum);
  table.add("min", &extremum);
  table.add("median", &scalar);
  table.add("nanmedian", &scalar);
  table.add("trace", &trace);
  table.add("dot", &dot);
  table.add("vdot", &dot);
  table.add("prod", &prod);
  table.add("nansum", &nansum);
  table.add("var.correction", &variance);
  table.add("std.correction", &variance);
  table.add("var_mean.correction", &variance_and_mean);
  table.add("std_mean.correction", &variance_and_mean);
  table.add("count_nonzero.dim_IntList", &count_nonzero);
  table.add("addbmm", &addbmm);
}

}  // namespace smp::runtime::meta
