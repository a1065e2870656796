// Between slots and the dispatcher's stack.
#include "runtime/stage/flat_call.h"

namespace smp::runtime {
namespace {

c10::IValue make_list(const FlatCall::ListArgument& argument, const Slots& slots) {
  if (!argument.optional_elements) {
    c10::List<at::Tensor> list;
    list.reserve(argument.slots.size());
    for (const int32_t slot : argument.slots) list.push_back(slot < 0 ? at::Tensor() : slots[static_cast<size_t>(slot)]);
    return list;
  }
  c10::List<std::optional<at::Tensor>> list;
  list.reserve(argument.slots.size());
  for (const int32_t slot : argument.slots) {
    list.push_back(slot < 0 ? std::nullopt : std::optional(slots[static_cast<size_t>(slot)]));
  }
  return list;
}

}  // namespace

size_t FlatCall::push(torch::jit::Stack& stack, const Slots& slots) const {
  const size_t first = stack.size();
  for (const c10::IValue& argument : arguments) {
    stack.push_back(copies_lists && argument.isList() ? argument.deepcopy() : argument);
  }
  for (const TensorArgument& tensor : tensors) {
    stack[first + tensor.position] = slots[static_cast<size_t>(tensor.slot)];
  }
  for (const ListArgument& list : lists) stack[first + list.position] = make_list(list, slots);
  return first;
}

void FlatCall::store(torch::jit::Stack& stack, Slots& slots) const {
  size_t k = 0;
  const auto store_one = [&](at::Tensor&& tensor) {
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(k < outputs.size());
    if (outputs[k] >= 0) slots[static_cast<size_t>(outputs[k])] = std::move(tensor);
    ++k;
  };
  for (c10::IValue& result : stack) {
    if (result.isInt()) continue;  // a size, which the calls that take it hold
    if (result.isTensor()) {
      store_one(std::move(result).toTensor());
    } else {
      for (at::Tensor tensor : result.toTensorVector()) store_one(std::move(tensor));
    }
  }
  stack.clear();
  for (const int32_t slot : freed) slots[static_cast<size_t>(slot)].reset();
}

}  // namespace smp::runtime
