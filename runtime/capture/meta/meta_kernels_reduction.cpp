// Meta kernels of reductions, and of ranges between tensors. Their results are contiguous whatever the input's strides.
#include <ATen/WrapDimUtilsMulti.h>
#include <c10/util/irange.h>

#include <tuple>
#include <type_traits>

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

// Values of lengths and offsets decide nothing about sizes, but the CPU checks them.
Tensor segment_reduce(const Tensor& data, c10::string_view /*reduce*/, const std::optional<Tensor>& lengths,
                      const std::optional<Tensor>& indices, const std::optional<Tensor>& offsets, int64_t axis,
                      bool /*unsafe*/, const std::optional<Scalar>& /*initial*/) {
  TORCH_CHECK_VALUE((lengths || offsets) && !indices, "segment_reduce: expected lengths or offsets, got ",
                    indices ? "indices, which LibTorch does not take yet" : "neither",
                    ". Give the lengths of the segments.");
  at::DimVector sizes(lengths ? lengths->sizes() : offsets.value().sizes());
  if (!lengths) --sizes.back();
  const auto rest = data.sizes().slice(static_cast<size_t>(at::maybe_wrap_dim(axis, data.dim())) + 1);
  sizes.append(rest.begin(), rest.end());
  return make(sizes, data.scalar_type());
}

Tensor range(bool is_complex, int64_t steps, std::optional<at::ScalarType> dtype) {
  const auto real = at::typeMetaToScalarType(at::get_default_dtype());
  return make({steps}, dtype.value_or(is_complex ? at::toComplexType(real) : real));
}

/// linspace and logspace, whose ends may be tensors: composites that read them.
template <class Start, class End, class... Base>
Tensor range_between(const Start& start, const End& end, int64_t steps, Base... /*base*/,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                     std::optional<at::Device> /*device*/, std::optional<bool> /*pin_memory*/) {
  const auto is_complex = [](const auto& bound) {
    if constexpr (std::is_same_v<std::decay_t<decltype(bound)>, Tensor>)
      return bound.is_complex();
    else
      return bound.isComplex();
  };
  return range(is_complex(start) || is_complex(end), steps, dtype);
}

}  // namespace

void add_reductions(Table& table) {
  table.add("max", &extremum);
  table.add("min", &extremum);
  table.add("var.correction", &variance);
  table.add("std.correction", &variance);
  table.add("var_mean.correction", &variance_and_mean);
  table.add("std_mean.correction", &variance_and_mean);
  table.add("segment_reduce", &segment_reduce);
  table.add("linspace.Tensor_Tensor", &range_between<Tensor, Tensor>);
  table.add("linspace.Tensor_Scalar", &range_between<Tensor, Scalar>);
  table.add("linspace.Scalar_Tensor", &range_between<Scalar, Tensor>);
  table.add("logspace.Tensor_Tensor", &range_between<Tensor, Tensor, double>);
  table.add("logspace.Tensor_Scalar", &range_between<Tensor, Scalar, double>);
  table.add("logspace.Scalar_Tensor", &range_between<Scalar, Tensor, double>);
}

}  // namespace smp::runtime::meta
