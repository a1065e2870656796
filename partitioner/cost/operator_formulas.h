// The formulas behind the table of operators: what a call computes and what autograd keeps of it.
#pragma once

#include <cstdint>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// Floating-point operations of one forward call, a multiply-add counted as two.
double product_flops(const Graph& graph, const Node& node);        // left operand: argument 0
double added_product_flops(const Graph& graph, const Node& node);  // argument 1; 0 is added
double summed_batch_flops(const Graph& graph, const Node& node);
double bilinear_flops(const Graph& graph, const Node& node);
double tensordot_flops(const Graph& graph, const Node& node);
double matrix_chain_flops(const Graph& graph, const Node& node);
double einsum_flops(const Graph& graph, const Node& node);
double convolution_flops(const Graph& graph, const Node& node);
double attention_flops(const Graph& graph, const Node& node);
double recurrent_flops(const Graph& graph, const Node& node);
double cell_flops(const Graph& graph, const Node& node);

/// Leaf kernels of a composite.
double cell_kernels(const Graph& graph, const Node& node);
double recurrent_kernels(const Graph& graph, const Node& node);

/// Bytes that autograd keeps beside recorded tensors, or that a backward needs for itself.
int64_t attention_saved_bytes(const Graph& graph, const Node& node);
int64_t recurrent_saved_bytes(const Graph& graph, const Node& node);
int64_t cell_saved_bytes(const Graph& graph, const Node& node);
int64_t pooling_indices_bytes(const Graph& graph, const Node& node);
int64_t bytes_of_first_input(const Graph& graph, const Node& node);
int64_t cosine_loss_saved_bytes(const Graph& graph, const Node& node);
int64_t cosine_loss_workspace_bytes(const Graph& graph, const Node& node);
int64_t cosine_saved_bytes(const Graph& graph, const Node& node);
int64_t cosine_workspace_bytes(const Graph& graph, const Node& node);
int64_t cross_entropy_saved_bytes(const Graph& graph, const Node& node);
int64_t quotient_backward_bytes(const Graph& graph, const Node& node);
int64_t dropout_saved_bytes(const Graph& graph, const Node& node);
int64_t row_statistics_bytes(const Graph& graph, const Node& node);
int64_t twice_bytes_of_first_input(const Graph& graph, const Node& node);
int64_t input_and_output_bytes(const Graph& graph, const Node& node);
int64_t converted_bytes(const Graph& graph, const Node& node);
int64_t row_copy_bytes(const Graph& graph, const Node& node);
int64_t group_statistics_bytes(const Graph& graph, const Node& node);
int64_t folded_copy_bytes(const Graph& graph, const Node& node);
int64_t channel_statistics_bytes(const Graph& graph, const Node& node);

/// How many of the first tensor arguments autograd keeps as copies, which the bytes above count.
int attention_copies(const Graph& graph, const Node& node);
int folded_copies(const Graph& graph, const Node& node);

}  // namespace smp::partitioner
