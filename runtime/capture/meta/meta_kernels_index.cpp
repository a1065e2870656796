// Meta kernels of indexing operators.
#include <ATen/WrapDimUtils.h>

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

Tensor repeat_interleave(const Tensor& repeats, std::optional<int64_t> output_size) {
  TORCH_CHECK_NOT_IMPLEMENTED(output_size.has_value(),
                              "aten::repeat_interleave: the size of its result depends on the values of a tensor, which has "
                              "none while its model is being captured; expected output_size to be given");
  return make({*output_size}, repeats.scalar_type());
}

}  // namespace

void add_indexing(Table& table) {
  table.add("index_select", &index_select);
  table.add("repeat_interleave.Tensor", &repeat_interleave);
}

}  // namespace smp::runtime::meta
