// Graphs as text: exact JSON to send and save, a hash and an equality by bits.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// Exact and canonical: equal graphs give equal text, on every rank. Doubles travel as 16 hex
/// digits of their bits, so that every NaN, infinity and signed zero survives.
std::string serialise(const Graph& graph);

/// The inverse of `serialise`. The text may come from anywhere: unknown or missing fields, wrong types, nesting that is too
/// deep, ids and alias sets out of range, outputs of another node, results used before they are made, and sizes and strides
/// that overflow throw c10::ValueError with the place in the text ("nodes[3].outputs[0]").
Graph deserialise_graph(std::string_view text);

/// FNV-1a (64 bits): the same in every process and on every machine. That of a graph is that of `serialise(graph)`.
uint64_t hash(std::string_view bytes);
uint64_t hash(const Graph& graph);

/// Like ==, but doubles are compared by their bits: a NaN equals itself and 0.0 differs from -0.0.
bool same_graph(const Graph& a, const Graph& b);
bool same_argument(const Argument& a, const Argument& b);

}  // namespace smp::partitioner
