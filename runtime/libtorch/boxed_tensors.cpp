// Tensor, Tensor[] and Tensor?[].
#include "runtime/libtorch/boxed_tensors.h"

#include <ATen/core/List.h>

namespace smp::runtime {

void for_each_tensor(const c10::IValue& boxed, const std::function<void(int, const at::Tensor&)>& visit) {
  if (boxed.isTensor()) {
    if (boxed.toTensor().defined()) visit(-1, boxed.toTensor());
  } else if (boxed.isTensorList() || boxed.isOptionalTensorList()) {
    int element = 0;
    for (const c10::IValue& each : boxed.toListRef()) {
      if (each.isTensor() && each.toTensor().defined()) visit(element, each.toTensor());
      ++element;
    }
  }
}

void map_tensors(c10::IValue& boxed, const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (boxed.isTensor()) {
    if (boxed.toTensor().defined()) boxed = replace(boxed.toTensor());
  } else if (boxed.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : boxed.toTensorVector()) list.push_back(tensor.defined() ? replace(tensor) : tensor);
    boxed = std::move(list);
  } else if (boxed.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : boxed.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(replace(*tensor)) : tensor);
    }
    boxed = std::move(list);
  }
}

void put_tensor(c10::IValue& boxed, int element, const at::Tensor& tensor) {
  const auto index = static_cast<size_t>(element);
  if (element < 0) {
    boxed = tensor;
  } else if (boxed.isTensorList()) {
    c10::List<at::Tensor> list = boxed.toTensorList().copy();
    list.set(index, tensor);
    boxed = std::move(list);
  } else {
    c10::List<std::optional<at::Tensor>> list = boxed.toOptionalTensorList().copy();
    list.set(index, tensor);
    boxed = std::move(list);
  }
}

}  // namespace smp::runtime
