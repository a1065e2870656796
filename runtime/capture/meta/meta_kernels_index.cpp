// Meta kernels of indexing, rearranging and index-making operators.
#include <ATen/WrapDimUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/roll_native.h>

#include <string_view>

#include "runtime/capture/meta/meta_kernels_table.h"

namespace smp::runtime::meta {
namespace {

using at::Tensor;

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  TORCH_CHECK_INDEX(index.dim() <= 1, "index_select(): expected an index of at most 1 dimension, got ", index.sizes());
  at::DimVector sizes(self.sizes());
  if (!sizes.empty()) sizes[at::maybe_wrap_dim(dim, self.dim())] = index.numel();
  return make(sizes, self.scalar_type());
}

Tensor take(const Tensor& self, const Tensor& index) { return make(index.sizes(), self.scalar_type()); }

Tensor flip(const Tensor& self, at::IntArrayRef /*dims*/) { return make_like(self); }

Tensor repeat_interleave(const Tensor& repeats, std::optional<int64_t> output_size) {
  TORCH_CHECK_NOT_IMPLEMENTED(output_size.has_value(),
                              "aten::repeat_interleave: the size of its result depends on the values of a tensor, which has "
                              "none while its model is being captured; expected output_size to be given");
  return make({*output_size}, repeats.scalar_type());
}

Tensor& randperm_out(int64_t n, std::optional<at::Generator> /*generator*/, Tensor& out) {
  at::native::resize_output(out, {n});
  return out;
}

Tensor tril_indices(int64_t row, int64_t col, int64_t offset, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                    std::optional<bool> /*pin_memory*/) {
  return make({2, at::native::get_tril_size(row, col, offset)}, dtype.value_or(at::kLong));
}

Tensor triu_indices(int64_t row, int64_t col, int64_t offset, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                    std::optional<bool> /*pin_memory*/) {
  // The upper triangle is what the lower one below it leaves over.
  return make({2, row * col - at::native::get_tril_size(row, col, offset - 1)}, dtype.value_or(at::kLong));
}

at::ScalarType position_type(bool out_int32) { return out_int32 ? at::kInt : at::kLong; }

Tensor searchsorted(const Tensor& /*sorted_sequence*/, const Tensor& self, bool out_int32, bool /*right*/,
                    std::optional<std::string_view> /*side*/, const std::optional<Tensor>& /*sorter*/) {
  return make(self.sizes(), position_type(out_int32));
}

Tensor bucketize(const Tensor& self, const Tensor& /*boundaries*/, bool out_int32, bool /*right*/) {
  return make(self.sizes(), position_type(out_int32));
}

Tensor multinomial(const Tensor& self, int64_t num_samples, bool /*replacement*/,
                   std::optional<at::Generator> /*generator*/) {
  TORCH_CHECK(self.dim() == 1 || self.dim() == 2, "multinomial(): expected probabilities [n] or [rows, n], got ",
              self.sizes());
  if (self.dim() == 1) return make({num_samples}, at::kLong);
  return make({self.size(0), num_samples}, at::kLong);
}

}  // namespace

void add_indexing(Table& table) {
  table.add("index_select", &index_select);
  table.add("take", &take);
  table.add("flip", &flip);
  table.add("roll",
            &at::native::roll);  // Made of narrow and cat, hence as good on meta as on the CPU.
  table.add("repeat_interleave.Tensor", &repeat_interleave);
  table.add("randperm.generator_out", &randperm_out);
  table.add("tril_indices", &tril_indices);
  table.add("triu_indices", &triu_indices);
  table.add("searchsorted.Tensor", &searchsorted);
  table.add("bucketize.Tensor", &bucketize);
  table.add("multinomial", &multinomial);
}

}  // namespace smp::runtime::meta
