// Advances a generator as a random operator does, without its result. Records nothing.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::runtime {

/// Most elements that one draw holds at a time, once and for all random operators that can be drawn in parts.
inline constexpr int64_t kDrawElements = int64_t{1} << 16;

/// Whether the numbers that the operator draws depend on no value of its tensors: uniform_, normal_, randn, randperm, …
bool draws_by_geometry(const c10::OperatorHandle& op, bool has_tensors);

/// Draws from `generator` as often as `op` does for a result of this geometry, in parts of at most
/// 2 * `elements`. False, and nothing is drawn, where the operator cannot be cut: then run it
/// whole. Proven per operator and type by tests/unit/runtime/delayed/draw_test.cpp.
bool draw_in_parts(const c10::OperatorHandle& op, const partitioner::TensorSpec& result, at::Generator generator,
                   int64_t elements = kDrawElements);

}  // namespace smp::runtime
