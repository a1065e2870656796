// The lists of calls that a tape is made of: plain data, and what all passes over them ask.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/device/device.h"
#include "runtime/kernels/cpu/own_kernels.h"
#include "runtime/stage/flat_call.h"

namespace smp::runtime {

/// What a view, or an input, must look like; whether autograd knows it does not matter.
partitioner::TensorSpec geometry_of(const at::Tensor& tensor);
bool fits(const at::Tensor& tensor, const partitioner::TensorSpec& geometry);

struct TapeCall : FlatCall {
  enum class Kind : uint8_t {
    kOperator,
    kView,      // outputs[0] = the memory of tensors[0] with another geometry, past the dispatcher
    kGradient,  // tensors[0] is the gradient of a parameter, whole
  };
  Kind kind = Kind::kOperator;
  OwnKernel kernel = nullptr;      // kOperator: in the place of the dispatcher's
  bool has_effect = false;         // writes or draws
  bool grad_enabled = false;       // as it was recorded: mkldnn_rnn_layer looks at it, although nothing is recorded for it
  bool ends_random = false;        // the last of the operators that draw under one seed
  int32_t random_ordinal = -1;     // >= 0: the first of them
  Draws draws = Draws::kByThread;  // what the operator of the graph does
  partitioner::TensorSpec geometry{};               // kView
  int32_t parameter = -1;                           // kGradient: among the own tensors
  partitioner::NodeId node = partitioner::kNoNode;  // the operator of the graph that this is part of, or of its backward
};

/// A tensor that is there before the tape runs.
struct TapeBinding {
  partitioner::ValueId value = partitioner::kNoValue;
  int32_t slot = -1;  // -1: not read
  partitioner::TensorSpec geometry{};
  bool is_written = false;
};

struct TapeOwn : TapeBinding {
  at::Tensor tensor;       // as it is outside of autograd
  bool is_fixed = false;   // a parameter or buffer: the same tensor in every microbatch
  bool is_folded = false;  // a constant of which calls have been folded: the tape is for this tensor
};

struct TapeBackward {
  size_t end = 0;              // behind its last call
  size_t results_end = 0;      // behind the last one on which the results depend
  std::vector<int32_t> roots;  // slots of the gradients that enter; -1: not read
  std::vector<partitioner::TensorSpec> root_geometries;
  std::vector<bool> has_root;    // whether that gradient is defined
  std::vector<int32_t> results;  // slots; -1: undefined
  std::vector<int32_t> freed;    // behind the results: those that no later call reads
};

/// The lists, as recorded or ready to run.
struct TapeLists {
  std::vector<TapeCall> calls;  // the forward, then the backwards in their order
  size_t forward_end = 0;
  size_t num_slots = 0;
  std::vector<TapeBinding> inputs;
  std::vector<TapeOwn> own;
  std::vector<int32_t> outputs;  // slots
  std::vector<int32_t> freed;    // behind the forward: inputs and outputs that no backward reads
  std::vector<TapeBackward> backwards;
  std::vector<partitioner::TensorSpec> slot_geometries;
  std::vector<int32_t> slot_memories;  // slots of one number lie on the same memory
  bool has_random = false;
  bool remakes_random = false;             // backwards draw what the forward has drawn
  bool changes_geometry_in_place = false;  // then two slots may start as one tensor and differ later

  size_t memory_of(int32_t slot) const { return static_cast<size_t>(slot_memories[static_cast<size_t>(slot)]); }
};

/// Visits the slots of what leaves the stage, like for_each_slot().
template <class Lists, class Visit>
void for_each_leaving(Lists& lists, const Visit& visit) {
  for_each_slot(lists.outputs, visit);
  for (auto& backward : lists.backwards) for_each_slot(backward.results, visit);
}

/// What the slots of each memory span together.
std::vector<int64_t> memory_bytes(const TapeLists& lists);

/// Drops the calls that do not stay. To be called before `results_end` and what is freed are found.
void keep_calls(TapeLists& lists, const std::vector<bool>& stays);

/// A tensor on the same memory, past the dispatcher: 5 times cheaper than a view operator.
at::Tensor view_of(const at::Tensor& base, const partitioner::TensorSpec& geometry);

}  // namespace smp::runtime
