// Meta kernels of reductions. Their results are contiguous whatever the input's strides.
#include <ATen/WrapDimUtilsMulti.h>
#include <c10/util/irange.h>

#include <tuple>

#include "runtime/capture/meta/meta_kernels_table.h"

namespace smp::runtime::meta {
namespace {

using at::OptionalIntArrayRef;
using at::Scalar;
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

Tensor extremum(const Tensor& self) {
  TORCH_CHECK(self.numel() > 0, "max(), min(): expected at least one element, got sizes ", self.sizes(),
              "; give the dim to reduce, or skip empty tensors");
  return make({}, self.scalar_type());
}

Tensor variance(const Tensor& self, OptionalIntArrayRef dims, const std::optional<Scalar>& /*correction*/, bool keepdim) {
  return make(reduced_sizes(self, dims, keepdim), c10::toRealValueType(self.scalar_type()));
}

std::tuple<Tensor, Tensor> variance_and_mean(const Tensor& self, OptionalIntArrayRef dims,
                                             const std::optional<Scalar>& correction, bool keepdim) {
  return {variance(self, dims, correction, keepdim), make(reduced_sizes(self, dims, keepdim), self.scalar_type())};
}

}  // namespace

void add_reductions(Table& table) {
  table.add("max", &extremum);
  table.add("min", &extremum);
  table.add("var.correction", &variance);
  table.add("std.correction", &variance);
  table.add("var_mean.correction", &variance_and_mean);
  table.add("std_mean.correction", &variance_and_mean);
}

}  // namespace smp::runtime::meta
