// Meta kernels of losses and of embedding bags.
#include <ATen/core/Reduction.h>

#include <tuple>

#include "runtime/capture/meta/meta_kernels_table.h"

namespace smp::runtime::meta {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensor binary_cross_entropy(const Tensor& self, const Tensor& target, const OptionalTensor& /*weight*/, int64_t reduction) {
  TORCH_CHECK_VALUE(self.sizes() == target.sizes(), "binary_cross_entropy(): expected a target of sizes ", self.sizes(),
                    ", got ", target.sizes());
  return reduction == at::Reduction::None ? make_like(self) : make({}, self.scalar_type());
}

constexpr int64_t kSum = 0, kMax = 2;  // modes of embedding_bag

/// Sums that the CPU hands to FBGEMM leave offset2bag empty (is_fast_path in EmbeddingBag.cpp).
bool sums_without_offset2bag(const Tensor& weight, int64_t mode, int64_t padding_idx,
                             const OptionalTensor& per_sample_weights) {
  const auto dtype = weight.scalar_type();
  const bool has_strided_weights =
      per_sample_weights.has_value() && per_sample_weights->defined() && per_sample_weights->stride(0) != 1;
  return mode == kSum && padding_idx < 0 && (dtype == at::kFloat || at::isReducedFloatingType(dtype)) &&
         weight.stride(1) == 1 && !has_strided_weights;
}

/// weight: [rows, width]; indices: [n]; offsets: [bags] (one more if include_last_offset).
/// Returns the bags, offset2bag, bag sizes and the indices of maxima.
Four embedding_bag(const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool /*scale_grad_by_freq*/,
                   int64_t mode, bool /*sparse*/, const OptionalTensor& per_sample_weights, bool include_last_offset,
                   int64_t padding_idx) {
  const int64_t num_bags = offsets.size(0) - (include_last_offset ? 1 : 0);
  const auto index_type = c10::promoteTypes(indices.scalar_type(), offsets.scalar_type());
  const bool is_fast = sums_without_offset2bag(weight, mode, padding_idx, per_sample_weights);
  const Tensor bags = make({num_bags, weight.size(1)}, weight.scalar_type());
  const Tensor max_indices = mode == kMax ? make(bags.sizes(), index_type) : make({num_bags}, index_type);
  return {bags, make({is_fast ? 0 : indices.numel()}, index_type), make({num_bags}, index_type), max_indices};
}

Four embedding_bag_forward_only(const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool scale_grad_by_freq,
                                int64_t mode, bool sparse, const OptionalTensor& per_sample_weights,
                                bool include_last_offset, int64_t padding_idx) {
  auto result = embedding_bag(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights,
                              include_last_offset, padding_idx);
  if (mode == kSum) {  // The CPU does not drop the last offset from the bag sizes of a sum here.
    std::get<2>(result) = make({offsets.size(0)}, std::get<2>(result).scalar_type());
    std::get<3>(result) = make({offsets.size(0)}, std::get<3>(result).scalar_type());
  }
  return result;
}

}  // namespace

void add_losses(Table& table) {
  table.add("binary_cross_entropy", &binary_cross_entropy);
  table.add("_embedding_bag", &embedding_bag);
  table.add("_embedding_bag_forward_only", &embedding_bag_forward_only);
}

}  // namespace smp::runtime::meta
