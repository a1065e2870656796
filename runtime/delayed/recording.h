// What the construction of modules did, as data, and how a part of it is done again. Intercepts nothing.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/libtorch/unmade.h"

namespace smp::runtime {

/// Operators in program order, on storages: a tensor is a storage and a geometry on it, so that
/// views, detach() and copies made behind the dispatcher need no records of their own.
///
/// Random operators carry the state of the generator before them. So values depend neither on which
/// others are computed nor on when, and no number is drawn for tensors that nobody asks for.
class DelayedRecording : public ValueSource {
 public:
  struct Use {
    size_t argument = 0;
    int element = -1;  // of a list; -1: the argument itself
    int32_t storage = -1;
    partitioner::TensorSpec geometry{};
    bool is_written = false;
  };
  struct Made {
    int32_t storage = -1;  // -1: not a new one
    partitioner::TensorSpec geometry{};
  };
  struct Operation {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments{};  // tensors of the recording are None here, other tensors copies
    std::vector<Use> uses{};
    std::vector<Made> made{};  // by returned tensor, lists flattened
    at::ScalarType default_dtype = at::kFloat;
    at::Tensor generator_state{};  // of a random operator
    int generator_argument = -1;   // given by the caller, else the default generator
    bool overwrites = false;       // all of the storage that it writes to, and reads nothing of it
  };

  int32_t new_storage(int64_t num_bytes);
  void add(Operation operation);

  /// Runs what they depend on, without gradients, and frees what is not asked for after its last use. Leaves the default
  /// generator as it is.
  std::vector<c10::Storage> compute(const std::vector<int32_t>& storages) const override;

 private:
  class Run;
  std::vector<size_t> slice(const std::vector<int32_t>& storages) const;

  std::vector<int64_t> num_bytes_;  // by storage
  std::vector<Operation> operations_;
};

}  // namespace smp::runtime
