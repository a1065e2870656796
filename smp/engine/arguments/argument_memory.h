// What the arguments of a step share memory with. Owns no state.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/capture/bindings.h"
#include "smp/step_call.h"

namespace smp::engine {

/// A microbatch writes to a copy of its part of an argument. Throws c10::ValueError where that would show: where an argument
/// that the body writes to shares memory with another one, with itself (expand), with one of `constants`, the tensors of the
/// program that the body has used, or with a parameter or buffer that it uses; and where an argument has memory of a
/// parameter or buffer that the body writes to.
/// `written`: positions of the inputs of `graph` that it writes to.
void check_argument_memory(const std::vector<step_internal::StepTensor>& arguments, const partitioner::Graph& graph,
                           const std::vector<size_t>& written, const std::vector<at::Tensor>& constants,
                           const runtime::Bindings& bindings);

}  // namespace smp::engine
