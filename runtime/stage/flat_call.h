// One operator call of a flat list: arguments prepared once, tensors named by slot; which slots it reads and makes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <vector>

namespace smp::runtime {

/// Tensors of one microbatch by slot.
using Slots = std::vector<at::Tensor>;

struct FlatCall {
  struct TensorArgument {
    uint32_t position;  // in the operator's arguments
    int32_t slot;
  };
  struct ListArgument {
    uint32_t position;
    std::vector<int32_t> slots;      // -1: no tensor
    bool optional_elements = false;  // Tensor?[]
  };

  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments{};  // tensors of slots missing
  std::vector<TensorArgument> tensors{};
  std::vector<ListArgument> lists{};
  std::vector<int32_t> outputs{};  // slots of the returned tensors, lists flattened; -1: not needed or undefined
  std::vector<int32_t> freed{};    // slots whose last use this is
  bool copies_lists = false;       // holds lists of numbers that the operator may change

  /// Puts the arguments on the stack. Returns the position of the first.
  size_t push(torch::jit::Stack& stack, const Slots& slots) const;
  /// Takes the results off the stack, which holds nothing else, and frees what is not used any more.
  void store(torch::jit::Stack& stack, Slots& slots) const;
};

/// Visits slots by reference, past those that are no tensor.
template <class SlotList, class Visit>
void for_each_slot(SlotList& slots, const Visit& visit) {
  for (auto& slot : slots) {
    if (slot >= 0) visit(slot);
  }
}

template <class Call, class Visit>
void for_each_read(Call& call, const Visit& visit) {
  for (auto& tensor : call.tensors) visit(tensor.slot);
  for (auto& list : call.lists) for_each_slot(list.slots, visit);
}

template <class Call, class Visit>
void for_each_made(Call& call, const Visit& visit) {
  for_each_slot(call.outputs, visit);
}

}  // namespace smp::runtime
