// The table, by what the operators are about.
#include "partitioner/graph/operator_traits.h"

#include <string>
#include <unordered_map>

namespace smp::partitioner {
namespace {

struct Traits {
  constexpr Traits(Trait trait) : bits(static_cast<uint32_t>(trait)) {}
  uint32_t bits;
};

constexpr Traits operator|(Trait a, Traits b) {
  b.bits |= static_cast<uint32_t>(a);
  return b;
}

// Traits of an overload stand under "name.overload", and count beside those of the name.
const std::unordered_map<std::string_view, Traits> kTraits = {
    // Values
    {"aten::item", Trait::kReadsValue},
    {"aten::_local_scalar_dense", Trait::kReadsValue},
    {"aten::is_nonzero", Trait::kReadsValue},
    {"aten::allclose", Trait::kReadsValue},
    {"aten::_assert_async", Trait::kReadsValue},
    {"aten::nonzero", Trait::kShapeFromData},
    {"aten::nonzero_numpy", Trait::kShapeFromData},
    {"aten::argwhere", Trait::kShapeFromData},
    {"aten::masked_select", Trait::kShapeFromData},
    {"aten::_unique", Trait::kShapeFromData},
    {"aten::_unique2", Trait::kShapeFromData},
    {"aten::unique_dim", Trait::kShapeFromData},
    {"aten::unique_consecutive", Trait::kShapeFromData},
    {"aten::_pack_padded_sequence", Trait::kLooksAtNumbers | Trait::kShapeFromData},
    {"aten::_pad_packed_sequence", Trait::kLooksAtNumbers},
    {"aten::corrcoef", Trait::kLooksAtNumbers},
    {"aten::cov", Trait::kLooksAtNumbers},
    {"aten::ctc_loss", Trait::kLooksAtNumbers},
    {"aten::gru.data", Trait::kLooksAtNumbers},
    {"aten::istft", Trait::kLooksAtNumbers},
    {"aten::lstm.data", Trait::kLooksAtNumbers},
    {"aten::nanquantile", Trait::kLooksAtNumbers},
    {"aten::narrow.Tensor", Trait::kLooksAtNumbers},
    {"aten::one_hot", Trait::kLooksAtNumbers},
    {"aten::quantile", Trait::kLooksAtNumbers},
    {"aten::rnn_relu.data", Trait::kLooksAtNumbers},
    {"aten::rnn_tanh.data", Trait::kLooksAtNumbers},
    {"aten::tensor_split", Trait::kLooksAtNumbers},
    // Questions about geometry
    {"aten::result_type", Trait::kAsksGeometry},
    {"aten::promote_types", Trait::kAsksGeometry},
    {"aten::can_cast", Trait::kAsksGeometry},
    {"aten::is_same_size", Trait::kAsksGeometry},
    {"aten::size", Trait::kAsksGeometry},
    {"aten::stride", Trait::kAsksGeometry},
    {"aten::sym_size", Trait::kAsksGeometry},
    {"aten::sym_stride", Trait::kAsksGeometry},
    {"aten::sym_numel", Trait::kAsksGeometry},
    {"aten::sym_storage_offset", Trait::kAsksGeometry},
    {"aten::is_floating_point", Trait::kAsksGeometry},
    {"aten::is_complex", Trait::kAsksGeometry},
    {"aten::is_signed", Trait::kAsksGeometry},
    {"aten::is_conj", Trait::kAsksGeometry},
    {"aten::is_neg", Trait::kAsksGeometry},
    {"aten::is_inference", Trait::kAsksGeometry},
    {"aten::_is_zerotensor", Trait::kAsksGeometry},
    {"aten::_fused_sdp_choice", Trait::kAsksGeometry},
    // Tensors themselves
    {"aten::_has_compatible_shallow_copy_type", Trait::kReplacesData | Trait::kOnHandle},
    {"aten::set_data", Trait::kReplacesData | Trait::kOnHandle},
    {"aten::set_", Trait::kReplacesData},
    {"aten::requires_grad_", Trait::kOnHandle},
    {"aten::retain_grad", Trait::kOnHandle},
    {"aten::detach_", Trait::kOnHandle},
    {"aten::is_leaf", Trait::kOnHandle},
    {"aten::is_set_to", Trait::kOnHandle},
    {"aten::output_nr", Trait::kOnHandle},
    {"aten::_version", Trait::kOnHandle},
    {"aten::_backward", Trait::kRunsBackward},
    // Memory
    {"aten::empty", Trait::kMakesUninitialised},
    {"aten::empty_like", Trait::kMakesUninitialised},
    {"aten::empty_strided", Trait::kMakesUninitialised},
    {"aten::empty_permuted", Trait::kMakesUninitialised},
    {"aten::new_empty", Trait::kMakesUninitialised},
    {"aten::new_empty_strided", Trait::kMakesUninitialised},
    {"aten::resize_", Trait::kMakesUninitialised | Trait::kChangesGeometryInPlace},
    {"aten::resize_as_", Trait::kChangesGeometryInPlace},
    {"aten::as_strided_", Trait::kChangesGeometryInPlace},
    {"aten::squeeze_", Trait::kChangesGeometryInPlace},
    {"aten::unsqueeze_", Trait::kChangesGeometryInPlace},
    {"aten::swapaxes_", Trait::kChangesGeometryInPlace},
    {"aten::swapdims_", Trait::kChangesGeometryInPlace},
    {"aten::t_", Trait::kChangesGeometryInPlace},
    {"aten::transpose_", Trait::kChangesGeometryInPlace},
    {"aten::uniform_", Trait::kOverwritesSelf},
    {"aten::normal_", Trait::kOverwritesSelf},
    {"aten::zero_", Trait::kOverwritesSelf},
    {"aten::fill_", Trait::kOverwritesSelf},
    {"aten::arange", Trait::kScalarSetsGeometry},
    {"aten::range", Trait::kScalarSetsGeometry},
    // Writes that the schema does not tell
    {"aten::batch_norm", Trait::kWritesStatistics},
    {"aten::instance_norm", Trait::kWritesStatistics},
    {"aten::native_batch_norm", Trait::kWritesStatistics},
    {"aten::cudnn_batch_norm", Trait::kWritesStatistics},
    {"aten::_batch_norm_impl_index", Trait::kWritesStatistics},
    {"aten::dropout", Trait::kZeroGivesArgument},
    {"aten::feature_dropout", Trait::kZeroGivesArgument},
    {"aten::alpha_dropout", Trait::kZeroGivesArgument},
    {"aten::feature_alpha_dropout", Trait::kZeroGivesArgument},
    // Arithmetic
    {"aten::add", Trait::kSavesNothing | Trait::kNeverThrows},
    {"aten::sub", Trait::kSavesNothing | Trait::kNeverThrows},
    {"aten::neg", Trait::kSavesNothing | Trait::kNeverThrows},
    {"aten::sum", Trait::kSavesNothing | Trait::kNeverThrows},
    {"aten::mean", Trait::kSavesNothing | Trait::kNeverThrows},
    {"aten::mul", Trait::kNeverThrows},
    {"aten::div", Trait::kNeverThrows},
    {"aten::add_", Trait::kSavesNothing},
    {"aten::sub_", Trait::kSavesNothing},
    {"aten::cat", Trait::kSavesNothing},
    {"aten::stack", Trait::kSavesNothing},
    {"aten::clone", Trait::kSavesNothing},
    {"aten::contiguous", Trait::kSavesNothing},
    {"aten::copy_", Trait::kSavesNothing},
    {"aten::detach", Trait::kSavesNothing},
    {"aten::to", Trait::kSavesNothing},
};

uint32_t traits_of(std::string_view key) {
  const auto row = kTraits.find(key);
  return row == kTraits.end() ? 0 : row->second.bits;
}

}  // namespace

bool has(Trait trait, std::string_view op, std::string_view overload) {
  uint32_t traits = traits_of(op);
  if (!overload.empty()) traits |= traits_of(std::string(op).append(".").append(overload));
  return (traits & static_cast<uint32_t>(trait)) != 0;
}

std::vector<std::string_view> operators_with_traits() {
  std::vector<std::string_view> operators;
  for (const auto& [op, traits] : kTraits) operators.push_back(op);
  return operators;
}

}  // namespace smp::partitioner
