// Reads schemas, tags and the tables of operators that need care.
#include "runtime/capture/operator_info.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>

#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "runtime/device/random.h"

namespace smp::runtime {
namespace {

using Names = std::unordered_set<std::string_view>;

const Names kReads = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::allclose",
                      "aten::_assert_async"};
const Names kQueries = {"aten::result_type", "aten::promote_types", "aten::can_cast", "aten::is_same_size",
                        "aten::size", "aten::stride", "aten::sym_size", "aten::sym_stride", "aten::sym_numel",
                        "aten::sym_storage_offset", "aten::dim", "aten::numel", "aten::is_floating_point",
                        "aten::is_complex", "aten::is_signed", "aten::is_conj", "aten::is_neg", "aten::is_inference",
                        "aten::_is_zerotensor", "aten::_fused_sdp_choice"};
const Names kReplacers = {"aten::_has_compatible_shallow_copy_type", "aten::set_data", "aten::set_"};
const Names kBackwards = {"aten::_backward"};
// Tagged data-dependent upstream only in part; bool-mask indexing is caught by the Meta kernel itself.
const Names kDynamicShapes = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                              "aten::unique_consecutive", "aten::argwhere", "aten::nonzero_numpy"};
const Names kEmpties = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty",
                        "aten::new_empty_strided", "aten::resize_", "aten::empty_permuted"};
const Names kScalarGeometry = {"aten::arange", "aten::range"};
const Names kDropouts = {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout",
                         "aten::feature_alpha_dropout"};
const Names kInPlaceGeometry = {"aten::t_", "aten::transpose_", "aten::swapaxes_", "aten::swapdims_",
                                "aten::squeeze_", "aten::unsqueeze_", "aten::resize_", "aten::resize_as_",
                                "aten::as_strided_"};

// Hidden mutation: running statistics change although the schema does not say so.
const std::unordered_map<std::string_view, std::vector<std::string_view>> kHiddenWrites = {
    {"aten::batch_norm", {"running_mean", "running_var"}},
    {"aten::instance_norm", {"running_mean", "running_var"}},
    {"aten::native_batch_norm", {"running_mean", "running_var"}},
    {"aten::cudnn_batch_norm", {"running_mean", "running_var"}},
    {"aten::_batch_norm_impl_index", {"running_mean", "running_var"}},
    {"aten::embedding_renorm_", {"self"}},
};

OperatorClass classify(const c10::OperatorHandle& op, const std::string& name) {
  if (name == "aten::equal") return OperatorClass::kAnsweredByIdentity;
  if (kReads.contains(name)) return OperatorClass::kReadsValue;
  if (kQueries.contains(name)) return OperatorClass::kGeometryQuery;
  if (kReplacers.contains(name)) return OperatorClass::kReplacesData;
  if (kBackwards.contains(name)) return OperatorClass::kRunsBackward;
  if (kDynamicShapes.contains(name) || op.hasTag(at::Tag::dynamic_output_shape)) {
    return OperatorClass::kDataDependentShape;
  }
  for (const auto& argument : op.schema().arguments()) {
    const auto kind = argument.type()->kind();
    if (kind == c10::TypeKind::StorageType || kind == c10::TypeKind::StreamObjType) {
      return OperatorClass::kReplacesData;
    }
  }
  for (const auto& result : op.schema().returns()) {
    const bool holds_tensors =
        result.type()->isSubtypeOf(*c10::TensorType::get()) ||
        result.type()->isSubtypeOf(*c10::ListType::ofTensors()) ||
        result.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
    if (!holds_tensors) return OperatorClass::kReadsValue;
  }
  return OperatorClass::kRecorded;
}

bool only_aliases(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) return false;
  }
  return !schema.returns().empty();
}

bool is_scalar(const c10::TypePtr& type) {
  auto inner = type;
  if (auto optional = type->cast<c10::OptionalType>()) inner = optional->getElementType();
  return inner->kind() == c10::TypeKind::NumberType || inner->kind() == c10::TypeKind::FloatType;
}

bool is_device(const c10::TypePtr& type) {
  auto inner = type;
  if (auto optional = type->cast<c10::OptionalType>()) inner = optional->getElementType();
  return inner->kind() == c10::TypeKind::DeviceObjType;
}

int argument_with_alias(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* own = arguments[i].alias_info();
    if (own != nullptr && own->isWrite() && own->beforeSets() == alias.beforeSets()) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

OperatorInfo::OperatorInfo(const c10::OperatorHandle& op)
    : name(op.operator_name().name), overload(op.operator_name().overload_name) {
  const auto& schema = op.schema();
  kind = classify(op, name);
  is_random = runtime::is_random(op);
  makes_uninitialised = kEmpties.contains(name);
  const std::string_view short_name = std::string_view(name).substr(name.find("::") + 2);
  reads_only_geometry = only_aliases(schema) || short_name.ends_with("_like") || short_name.starts_with("new_") ||
                        makes_uninitialised;
  scalars_set_geometry = kScalarGeometry.contains(name);
  zero_returns_argument = kDropouts.contains(name);
  copies_to_device = name == "aten::to" || name == "aten::_to_copy";
  changes_geometry_in_place = kInPlaceGeometry.contains(name);
  num_arguments = static_cast<int>(schema.arguments().size());
  if (name == "aten::one_hot") shape_argument = schema.argumentIndexWithName("num_classes").value_or(-1);
  if (name == "aten::repeat_interleave") shape_argument = schema.argumentIndexWithName("output_size").value_or(-1);
  for (const char* flag : {"train", "training", "use_input_stats"}) {
    if (const auto position = schema.argumentIndexWithName(flag)) training_argument = *position;
  }
  const auto hidden = kHiddenWrites.find(name);
  for (const auto& argument : schema.arguments()) {
    const bool is_declared = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    bool written = is_declared;
    if (hidden != kHiddenWrites.end()) {
      for (const auto& hidden_name : hidden->second) written = written || argument.name() == hidden_name;
    }
    argument_written.push_back(written);
    write_is_hidden.push_back(written && !is_declared);
    argument_is_scalar.push_back(is_scalar(argument.type()));
    argument_is_device.push_back(is_device(argument.type()));
  }
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    returned_argument.push_back(alias != nullptr && alias->isWrite() ? argument_with_alias(schema, *alias) : -1);
  }
}

namespace {

bool is_in_evaluation(const OperatorInfo& info, const partitioner::Node& node) {
  if (info.training_argument < 0) return false;
  const auto* trains = std::get_if<bool>(&node.arguments.at(static_cast<size_t>(info.training_argument)));
  return trains != nullptr && !*trains;
}

}  // namespace

const OperatorInfo& operator_info(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<c10::OperatorHandle, std::unique_ptr<OperatorInfo>> cache;
  std::lock_guard<std::mutex> lock(mutex);
  auto& slot = cache[op];
  if (!slot) slot = std::make_unique<OperatorInfo>(op);
  return *slot;
}

bool draws(const OperatorInfo& info, const partitioner::Node& node) {
  return node.random_ordinal >= 0 && !is_in_evaluation(info, node);
}

bool writes(const OperatorInfo& info, const partitioner::Node& node, size_t argument) {
  return info.argument_written[argument] && !(info.write_is_hidden[argument] && is_in_evaluation(info, node));
}

}  // namespace smp::runtime
