// Meta kernels of normalisations, including the saved statistics that only their backward reads.
#include <ATen/native/cpu/mixed_data_type.h>

#include <tuple>

#include "runtime/capture/meta/meta_kernels_table.h"

namespace smp::runtime::meta {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor value_or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

/// Statistics of bfloat16 or half inputs with float parameters are kept in float.
template <typename... Parameters>
at::ScalarType statistics_type(const Tensor& input, const Parameters&... parameters) {
  return at::native::param_scalar_type(input, at::native::is_mixed_type(input, value_or_undefined(parameters)...));
}

/// input: [n, c, ...]; statistics: [c] in training, [0] otherwise.
Three batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                 const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training, double /*momentum*/,
                 double /*eps*/) {
  const auto dtype = statistics_type(input, weight, bias, running_mean, running_var);
  const int64_t num_statistics = training ? input.size(1) : 0;
  return {make(input.sizes(), input.scalar_type(), input.suggest_memory_format()), make({num_statistics}, dtype),
          make({num_statistics}, dtype)};
}

/// Statistics have the input's dimensions, with 1 for the normalised ones.
Three layer_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                 const OptionalTensor& bias, double /*eps*/) {
  const auto num_kept = input.dim() - static_cast<int64_t>(normalized_shape.size());
  TORCH_CHECK(num_kept >= 0 && input.sizes().slice(num_kept) == normalized_shape,
              "layer_norm(): expected an input that ends in ", normalized_shape, ", got ", input.sizes());
  at::DimVector sizes(input.sizes());
  std::fill(sizes.begin() + num_kept, sizes.end(), 1);
  const auto dtype = statistics_type(input, weight, bias);
  return {make(input.sizes(), input.scalar_type()), make(sizes, dtype), make(sizes, dtype)};
}

Three group_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, int64_t batch_size,
                 int64_t /*num_channels*/, int64_t /*num_pixels*/, int64_t num_groups, double /*eps*/) {
  const auto dtype = statistics_type(input, weight, bias);
  return {make(input.sizes(), input.scalar_type(), input.suggest_memory_format()), make({batch_size, num_groups}, dtype),
          make({batch_size, num_groups}, dtype)};
}

}  // namespace

void add_norms(Table& table) {
  table.add("native_batch_norm", &batch_norm);
  table.add("native_layer_norm", &layer_norm);
  table.add("native_group_norm", &group_norm);
}

}  // namespace smp::runtime::meta
