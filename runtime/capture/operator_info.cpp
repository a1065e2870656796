// Reads schemas, tags and the table of traits.
#include "runtime/capture/operator_info.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>

#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "partitioner/graph/operator_traits.h"
#include "runtime/device/random.h"

namespace smp::runtime {
namespace {

using partitioner::Trait;

OperatorClass classify(const c10::OperatorHandle& op, const std::string& name) {
  if (name == "aten::equal") return OperatorClass::kAnsweredByIdentity;
  if (has(Trait::kReadsValue, name)) return OperatorClass::kReadsValue;
  if (has(Trait::kAsksGeometry, name)) return OperatorClass::kGeometryQuery;
  if (has(Trait::kReplacesData, name)) return OperatorClass::kReplacesData;
  if (has(Trait::kRunsBackward, name)) return OperatorClass::kRunsBackward;
  // Tagged upstream only in part; bool-mask indexing is caught by the Meta kernel itself.
  const bool is_where_of_one = name == "aten::where" && op.operator_name().overload_name.empty();  // nonzero in a tuple
  if (is_where_of_one || has(Trait::kShapeFromData, name) || op.hasTag(at::Tag::dynamic_output_shape)) {
    return OperatorClass::kDataDependentShape;
  }
  for (const auto& argument : op.schema().arguments()) {
    const auto kind = argument.type()->kind();
    if (kind == c10::TypeKind::StorageType || kind == c10::TypeKind::StreamObjType) {
      return OperatorClass::kReplacesData;
    }
  }
  for (const auto& result : op.schema().returns()) {
    const bool holds_tensors = result.type()->isSubtypeOf(*c10::TensorType::get()) ||
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
  makes_uninitialised = has(Trait::kMakesUninitialised, name);
  const std::string_view short_name = std::string_view(name).substr(name.find("::") + 2);
  reads_only_geometry =
      only_aliases(schema) || short_name.ends_with("_like") || short_name.starts_with("new_") || makes_uninitialised;
  scalars_set_geometry = has(Trait::kScalarSetsGeometry, name);
  zero_returns_argument = has(Trait::kZeroGivesArgument, name);
  may_copy_to_host = name == "aten::to" && (overload == "dtype_layout" || overload == "device");
  changes_geometry_in_place = has(Trait::kChangesGeometryInPlace, name);
  num_arguments = static_cast<int>(schema.arguments().size());
  if (name == "aten::one_hot") shape_argument = schema.argumentIndexWithName("num_classes").value_or(-1);
  if (name == "aten::repeat_interleave") shape_argument = schema.argumentIndexWithName("output_size").value_or(-1);
  for (const char* flag : {"train", "training", "use_input_stats"}) {
    if (const auto position = schema.argumentIndexWithName(flag)) training_argument = *position;
  }
  const bool writes_statistics = has(Trait::kWritesStatistics, name);
  for (const auto& argument : schema.arguments()) {
    const bool is_declared = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const bool is_hidden =
        writes_statistics && !is_declared && (argument.name() == "running_mean" || argument.name() == "running_var");
    argument_written.push_back(is_declared || is_hidden);
    write_is_hidden.push_back(is_hidden);
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
