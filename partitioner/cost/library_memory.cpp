// Sizes of oneDNN's layouts and workspaces.
#include "partitioner/cost/library_memory.h"

#include <algorithm>

#include "partitioner/cost/argument_specs.h"
#include "partitioner/graph/tensor_bytes.h"

namespace smp::partitioner {
namespace {

constexpr int64_t kBlock = 16;  // channels, and floats of one row's padding
constexpr int64_t kPage = 4096;

/// Bytes of (batch, channels, …) with its channels padded to whole blocks.
int64_t blocked_bytes(const TensorSpec& spec, int64_t block = kBlock) {
  if (spec.sizes.size() < 2 || spec.sizes[1] == 0) return 0;
  return spec.num_bytes() / spec.sizes[1] * rounded_up(spec.sizes[1], block);
}

bool is_pointwise(const TensorSpec& weight) {
  return std::all_of(weight.sizes.begin() + std::min<std::ptrdiff_t>(2, std::ssize(weight.sizes)), weight.sizes.end(),
                     [](int64_t size) { return size == 1; });
}

/// Small ones, and those of single elements, run as a product. (ATen/native/Convolution.cpp, use_mkldnn)
bool is_blocked(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  if (input.sizes.size() < 3 || input.dtype != c10::ScalarType::Float) return false;
  return input.sizes[0] >= kBlock || !is_pointwise(spec_of_argument(graph, node, 1));
}

/// One layer and direction of an LSTM.
struct LstmLayer {
  int64_t steps, batch, input, hidden;
  int64_t weight_bytes() const { return 4 * hidden * (input + hidden) * 4; }
  int64_t output_bytes() const { return steps * batch * hidden * 4; }
  int64_t gate_bytes() const { return rounded_up(steps * batch * row_bytes(4 * hidden), kPage); }
  /// A row of floats: whole lines of the cache, never a multiple of four of them.
  static int64_t row_bytes(int64_t floats) {
    const int64_t padded = rounded_up(floats, kBlock);
    return 4 * (padded % (4 * kBlock) == 0 ? padded + kBlock : padded);
  }
  /// Gates, and states with their gradients of both ends of the layer, in pages.
  int64_t kept_bytes() const {
    const int64_t rows = (steps + 1) * batch;
    const int64_t ends = rounded_up(2 * rows * row_bytes(std::max(input, hidden)), kPage);
    const int64_t states = rounded_up(2 * rows * row_bytes(hidden), kPage);
    return gate_bytes() + 2 * ends + 2 * states + rounded_up(rows * row_bytes(hidden), kPage) + kPage;
  }
  int64_t forward_bytes() const { return weight_bytes() + gate_bytes() + 5 * kPage + output_bytes(); }
  int64_t backward_bytes() const {
    const bool is_padded = input % kBlock != 0 || hidden % kBlock != 0;
    return weight_bytes() * (is_padded ? 2 : 1) + gate_bytes() + 5 * kPage + output_bytes();
  }
};

/// Arguments of aten::lstm: input, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first.
struct Lstm {
  int64_t layers = 1, directions = 1;
  bool drops = false;
  LstmLayer first{}, inner{};

  /// The sum or the maximum over all layers and directions.
  int64_t sum(int64_t (LstmLayer::*bytes)() const) const {
    return directions * ((first.*bytes)() + (layers - 1) * (inner.*bytes)());
  }
  int64_t most(int64_t (LstmLayer::*bytes)() const) const {
    return std::max((first.*bytes)(), layers > 1 ? (inner.*bytes)() : 0);
  }
};

Lstm lstm_of(const Graph& graph, const Node& node) {
  Lstm lstm;
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  const TensorSpec& state = spec_of_argument(graph, node, 1);
  if (input.sizes.size() != 3 || state.sizes.empty()) return lstm;
  const bool batch_first = argument_or(node, 8, false);
  lstm.layers = std::max<int64_t>(1, argument_or<int64_t>(node, 4, 1));
  lstm.directions = argument_or(node, 7, false) ? 2 : 1;
  lstm.drops = argument_or(node, 5, 0.0) > 0 && argument_or(node, 6, false);
  const int64_t hidden = state.sizes.back();
  lstm.first = {input.sizes[batch_first ? 1 : 0], input.sizes[batch_first ? 0 : 1], input.sizes[2], hidden};
  lstm.inner = lstm.first;
  lstm.inner.input = lstm.directions * hidden;
  return lstm;
}

}  // namespace

int64_t convolution_workspace_bytes(const Graph& graph, const Node& node) {
  if (!is_blocked(graph, node)) return 0;
  const TensorSpec& output = spec_of_output(graph, node);
  const bool is_transposed = node.op.find("transpose") != std::string::npos;
  const TensorSpec& weight = spec_of_argument(graph, node, 1);
  if (is_transposed) {
    return blocked_bytes(spec_of_argument(graph, node, 0)) + 2 * blocked_bytes(output) + weight.num_bytes() + 5 * kPage;
  }
  const bool is_plain = size_or(weight, 1, 1) < kBlock / 2;  // few channels are read as they are
  return blocked_bytes(output) + (is_plain ? 0 : weight.num_bytes());
}

int64_t convolution_backward_workspace_bytes(const Graph& graph, const Node& node) {
  if (!is_blocked(graph, node)) return 0;
  const TensorSpec& output = spec_of_output(graph, node);
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  const bool is_wide = input.sizes[1] >= kBlock / 2;
  const bool is_half = is_wide && size_or(output, 1, 1) < kBlock / 2;  // then half a block is enough
  return blocked_bytes(output, is_half ? kBlock / 2 : kBlock) + (input.requires_grad || is_wide ? blocked_bytes(input) : 0) +
         spec_of_argument(graph, node, 1).num_bytes();
}

int64_t lstm_saved_bytes(const Graph& graph, const Node& node) {
  const Lstm lstm = lstm_of(graph, node);
  const int64_t inner_output = lstm.directions * lstm.first.output_bytes();
  return lstm.sum(&LstmLayer::kept_bytes) + (lstm.layers - 1) * inner_output * (lstm.drops ? 3 : 1);
}

int64_t lstm_workspace_bytes(const Graph& graph, const Node& node) {
  return lstm_of(graph, node).most(&LstmLayer::forward_bytes);
}

int64_t lstm_backward_workspace_bytes(const Graph& graph, const Node& node) {
  return lstm_of(graph, node).most(&LstmLayer::backward_bytes);
}

}  // namespace smp::partitioner
