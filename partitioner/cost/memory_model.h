// Bytes that training keeps: parameters, gradients, optimizer state, and what autograd saves per microbatch.
#pragma once

#include <cstdint>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// What one parameter or buffer costs on every rank that holds it.
struct ParameterBytes {
  int64_t parameter = 0;
  int64_t gradient = 0;  // 0 without requires_grad
  int64_t optimizer = 0;
  int64_t total() const { return parameter + gradient + optimizer; }
};

/// `optimizer_state_factor`: state in units of the parameter: 0 SGD, 1 momentum, 2 Adam.
ParameterBytes parameter_bytes(const Value& value, double optimizer_state_factor);

/// By storage number: whether a parameter, buffer or constant lies on it, which stays anyway.
std::vector<char> permanent_storages(const Graph& graph);

/// Storages that `node` keeps until its backward, those of `is_permanent` left out, without
/// duplicates. Empty when it has no backward.
std::vector<int32_t> saved_storages(const Graph& graph, const Node& node, const std::vector<char>& is_permanent);

/// Of the copies that autocast makes for one call, kept or not.
int64_t cast_bytes(const Graph& graph, const Node& node);

/// Bytes kept beside recorded tensors, e.g. the noise of a dropout, or copies of other precision.
int64_t extra_saved_bytes(const Graph& graph, const Node& node);

/// By NodeId: bytes per microbatch in flight. Each storage counts once, at the first node that
/// saves it. All zero when the graph has no backward.
std::vector<int64_t> activation_bytes(const Graph& graph);

}  // namespace smp::partitioner
