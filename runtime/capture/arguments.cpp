// Conversion of operator arguments.
#include "runtime/capture/arguments.h"

#include <ATen/core/List.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/capture/ghosts.h"
#include "runtime/device/device.h"

namespace smp::runtime {
namespace {

using namespace partitioner;

template <class... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <class... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

Argument tensor_argument(const at::Tensor& tensor, const TensorToValue& resolve) {
  if (!tensor.defined()) return UndefinedTensor{};
  return ValueRef{resolve(tensor)};
}

Argument tensor_list_argument(const c10::IValue& boxed, const TensorToValue& resolve) {
  ValueRefList refs{.ids = {}, .optional_elements = boxed.isOptionalTensorList()};
  for (const c10::IValue& element : boxed.toListRef()) {
    const bool is_present = element.isTensor() && element.toTensor().defined();
    refs.ids.push_back(is_present ? resolve(element.toTensor()) : kNoValue);
  }
  return refs;
}

Argument scalar_list_argument(const c10::IValue& boxed, const std::string& op) {
  ScalarList list;
  for (const c10::IValue& element : boxed.toListRef()) {
    if (element.isBool()) {
      list.elements.emplace_back(element.toBool());
    } else if (element.isInt()) {
      list.elements.emplace_back(element.toInt());
    } else {
      TORCH_CHECK_NOT_IMPLEMENTED(element.isDouble(), op, ": expected a list of numbers or tensors, got a list of ",
                                  element.tagKind(),
                                  ". The operator cannot be captured; use another form of it in the model, or compute it "
                                  "outside of the step and pass the result as an argument.");
      list.elements.emplace_back(element.toDouble());
    }
  }
  return list;
}

Argument device_argument(const c10::Device& device) {
  if (device.type() == this_ranks_device().type) return StageDevice{};
  return NamedDevice{c10::DeviceTypeName(device.type(), /*lower_case=*/true)};
}

}  // namespace

Argument to_argument(const c10::IValue& boxed, const TensorToValue& resolve, const std::string& op) {
  if (boxed.isTensor()) return tensor_argument(boxed.toTensor(), resolve);
  if (boxed.isNone()) return std::monostate{};
  if (boxed.isInt()) return boxed.toInt();
  if (boxed.isBool()) return boxed.toBool();
  if (boxed.isDouble()) return boxed.toDouble();
  if (boxed.isIntList()) return boxed.toIntVector();
  if (boxed.isTensorList() || boxed.isOptionalTensorList()) return tensor_list_argument(boxed, resolve);
  if (boxed.isComplexDouble()) {
    const auto value = boxed.toComplexDouble();
    return std::complex<double>(value.real(), value.imag());
  }
  if (boxed.isString()) return std::string(boxed.toStringRef());
  if (boxed.isDevice()) return device_argument(boxed.toDevice());
  if (boxed.isDoubleList()) return boxed.toDoubleVector();
  if (boxed.isBoolList()) {
    const auto list = boxed.toBoolList();
    return std::vector<bool>(list.begin(), list.end());
  }
  if (boxed.isList()) return scalar_list_argument(boxed, op);
  TORCH_CHECK_NOT_IMPLEMENTED(!boxed.isGenerator(), op,
                              ": expected no generator of its own, got one. Leave it out: every random operator of a step "
                              "draws from a seed made of Config::seed, step, microbatch and its place in the graph.");
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": expected tensors, numbers, strings or lists as arguments, got a ",
                              boxed.tagKind(), ". The operator cannot be captured; use another form of it in the model.");
}

c10::IValue to_ivalue(const Argument& argument, const ValueToTensor& tensor_of, c10::Device stage_device) {
  return std::visit(
      Overloaded{
          [](std::monostate) { return c10::IValue(); },
          [](UndefinedTensor) { return c10::IValue(at::Tensor()); },
          [&](ValueRef ref) { return c10::IValue(tensor_of(ref.id)); },
          [&](const ValueRefList& refs) -> c10::IValue {
            if (!refs.optional_elements) {
              c10::List<at::Tensor> list;
              list.reserve(refs.ids.size());
              for (ValueId id : refs.ids) list.push_back(id == kNoValue ? at::Tensor() : tensor_of(id));
              return list;
            }
            c10::List<std::optional<at::Tensor>> list;
            list.reserve(refs.ids.size());
            for (ValueId id : refs.ids) {
              list.push_back(id == kNoValue ? std::nullopt : std::optional<at::Tensor>(tensor_of(id)));
            }
            return list;
          },
          [](const std::complex<double>& value) { return c10::IValue(c10::complex<double>(value.real(), value.imag())); },
          [](const ScalarList& scalars) -> c10::IValue {
            c10::List<at::Scalar> list;
            for (const auto& element : scalars.elements) {
              std::visit([&](auto value) { list.push_back(at::Scalar(value)); }, element);
            }
            return list;
          },
          [&](StageDevice) { return c10::IValue(stage_device); },
          [](const NamedDevice& device) { return c10::IValue(c10::Device(device.type)); },
          [](const std::vector<bool>& values) -> c10::IValue {
            c10::List<bool> list;
            for (bool value : values) list.push_back(value);
            return list;
          },
          [](const auto& value) { return c10::IValue(value); },
      },
      argument);
}

OperatorClass class_of_call(const OperatorInfo& info, const torch::jit::Stack& stack) {
  if (info.kind != OperatorClass::kDataDependentShape) return info.kind;
  const auto* arguments = &stack.end()[-info.num_arguments];
  bool is_given = false;
  if (info.shape_argument >= 0) {
    const c10::IValue& number = arguments[info.shape_argument];
    is_given = number.isInt() && number.toInt() >= 0;
  } else if (info.name == "aten::index") {
    const auto indices = arguments[1].toListRef();
    is_given = std::none_of(indices.begin(), indices.end(), [](const c10::IValue& index) {
      return index.isTensor() && index.toTensor().defined() &&
             (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte);
    });
  }
  return is_given ? OperatorClass::kRecorded : info.kind;
}

}  // namespace smp::runtime
