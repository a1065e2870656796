// Operator arguments between the dispatcher's boxed form and the graph's data form. Owns no tensors.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <string>

#include "partitioner/graph/graph.h"
#include "runtime/capture/operator_info.h"

namespace smp::runtime {

/// Turns a tensor argument into a value.
using TensorToValue = std::function<partitioner::ValueId(const at::Tensor&)>;
/// The tensor of a value while a graph runs.
using ValueToTensor = std::function<at::Tensor(partitioner::ValueId)>;

/// Data form of a boxed argument. Tensors inside go through `resolve`.
/// Throws NotImplementedError naming `op` for argument types a graph cannot hold.
partitioner::Argument to_argument(const c10::IValue& boxed, const TensorToValue& resolve, const std::string& op);

/// Boxed form. Lists are new objects each time, because operators may change them.
c10::IValue to_ivalue(const partitioner::Argument& argument, const ValueToTensor& tensor_of, c10::Device stage_device);

/// info.kind, unless the arguments, last on the stack, say that data decide no shape: one_hot and repeat_interleave with a
/// number, index without masks are kRecorded.
OperatorClass class_of_call(const OperatorInfo& info, const torch::jit::Stack& stack);

}  // namespace smp::runtime
