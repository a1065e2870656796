// One operator call of a flat list: arguments prepared once, tensors named by slot.
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

}  // namespace smp::runtime
