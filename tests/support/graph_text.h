// Graphs as text, for expectations and failures.
#pragma once

#include <string>

#include "partitioner/graph/graph.h"

namespace smp::support {

/// First inputs, parameters, buffers and constants, then one line per node.
///
///   %12: float32[32,35,200] = aten::addmm(%4 encoder.bias, %3, %11, 1, 1)   # encoder.layers.0
///
/// Strides follow in braces where a tensor is not contiguous; remarks such as no_grad stand behind the module.
std::string to_text(const partitioner::Graph& graph);

}  // namespace smp::support
