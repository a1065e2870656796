// What oneDNN, behind LibTorch's convolutions and LSTMs on the CPU, takes and keeps for itself.
#pragma once

#include <cstdint>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// Copies of activations in blocks of 16 channels, while a convolution runs. Measured with LibTorch
/// 2.11 on a processor with AVX-512; with AVX2 the blocks, and so the copies, are smaller.
int64_t convolution_workspace_bytes(const Graph& graph, const Node& node);
int64_t convolution_backward_workspace_bytes(const Graph& graph, const Node& node);

/// aten::lstm over one sequence: what its layers keep for the backward beside recorded tensors, and
/// what they need while they run. Fitted to measurements, from above; within 7 % on 13 shapes.
int64_t lstm_saved_bytes(const Graph& graph, const Node& node);
int64_t lstm_workspace_bytes(const Graph& graph, const Node& node);
int64_t lstm_backward_workspace_bytes(const Graph& graph, const Node& node);

}  // namespace smp::partitioner
