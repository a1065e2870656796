// The table of operators. Composites appear as they are recorded: undecomposed.
#include "partitioner/cost/operator_table.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

namespace smp::partitioner {
namespace {

const TensorSpec& spec_of_argument(const Graph& graph, const Node& node, size_t position) {
  static const TensorSpec kEmpty{.sizes = {0}, .strides = {1}};
  if (position >= node.arguments.size()) return kEmpty;
  const Argument& argument = node.arguments[position];
  ValueId id = kNoValue;
  if (const auto* value = std::get_if<ValueRef>(&argument)) id = value->id;
  if (const auto* list = std::get_if<ValueRefList>(&argument); list && !list->ids.empty()) {
    id = list->ids[0];
  }
  return id == kNoValue ? kEmpty : graph.values[id].spec;
}

double elements_of_outputs(const Graph& graph, const Node& node) {
  double elements = 0;
  for (ValueId id : node.outputs) {
    if (id != kNoValue) elements += static_cast<double>(graph.values[id].spec.num_elements());
  }
  return elements;
}

int64_t bytes_of_first_output(const Graph& graph, const Node& node) {
  const bool has_output = !node.outputs.empty() && node.outputs[0] != kNoValue;
  return has_output ? graph.values[node.outputs[0]].spec.num_bytes() : 0;
}

int64_t last_size(const TensorSpec& spec) { return spec.sizes.empty() ? 1 : spec.sizes.back(); }

/// output elements x contracted dimension, of the product whose left operand is argument `kLeft`.
template <size_t kLeft>
double product_flops(const Graph& graph, const Node& node) {
  const auto contracted = static_cast<double>(last_size(spec_of_argument(graph, node, kLeft)));
  return 2 * elements_of_outputs(graph, node) * contracted;
}

/// sqrt(a b c) is m k n for (m, k) x (k, n); exact without batch dimensions, too large with them.
double einsum_flops(const Graph& graph, const Node& node) {
  double product = elements_of_outputs(graph, node);
  for (ValueId id : node_inputs(node)) {
    product *= static_cast<double>(graph.values[id].spec.num_elements());
  }
  return 2 * std::sqrt(product);
}

double convolution_flops(const Graph& graph, const Node& node) {
  const TensorSpec& weight = spec_of_argument(graph, node, 1);
  const bool is_transposed = node.op.find("transpose") != std::string::npos ||
                             (node.arguments.size() > 6 && std::get_if<bool>(&node.arguments[6]) &&
                              std::get<bool>(node.arguments[6]));
  // Every element of the output (transposed: of the input) meets the weights of one of its
  // channels.
  const double elements = is_transposed
                              ? static_cast<double>(spec_of_argument(graph, node, 0).num_elements())
                              : elements_of_outputs(graph, node);
  const double channels = weight.sizes.empty() ? 1 : static_cast<double>(weight.sizes[0]);
  return 2 * elements * static_cast<double>(weight.num_elements()) / std::max(1.0, channels);
}

double attention_flops(const Graph& graph, const Node& node) {
  const TensorSpec& key = spec_of_argument(graph, node, 1);
  if (key.sizes.size() < 2) return 0;
  const auto keys = static_cast<double>(key.sizes[key.sizes.size() - 2]);
  return 4 * static_cast<double>(spec_of_argument(graph, node, 0).num_elements()) * keys;
}

/// (batch x heads, queries, keys) in elements of the query: the weights that attention with dropout
/// keeps.
int64_t attention_saved_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& query = spec_of_argument(graph, node, 0);
  const TensorSpec& key = spec_of_argument(graph, node, 1);
  if (key.sizes.size() < 2 || last_size(query) == 0) return 0;
  return query.num_bytes() / last_size(query) * key.sizes[key.sizes.size() - 2];
}

/// steps x batch of a recurrent layer's input (steps, batch, features) or (batch, steps, features).
int64_t recurrent_positions(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  return last_size(input) == 0 ? 0 : input.num_elements() / last_size(input);
}

/// Weights of all layers and directions: the two-dimensional members of the parameter list.
std::vector<const TensorSpec*> recurrent_weights(const Graph& graph, const Node& node) {
  std::vector<const TensorSpec*> weights;
  if (node.arguments.size() < 3) return weights;
  if (const auto* list = std::get_if<ValueRefList>(&node.arguments[2])) {
    for (ValueId id : list->ids) {
      if (id != kNoValue && graph.values[id].spec.sizes.size() == 2) {
        weights.push_back(&graph.values[id].spec);
      }
    }
  }
  return weights;
}

double recurrent_flops(const Graph& graph, const Node& node) {
  double elements = 0;
  for (const TensorSpec* weight : recurrent_weights(graph, node)) {
    elements += static_cast<double>(weight->num_elements());
  }
  return 2 * elements * static_cast<double>(recurrent_positions(graph, node));
}

/// Gates before and after their nonlinearity, one row of each weight pair per position.
int64_t recurrent_saved_bytes(const Graph& graph, const Node& node) {
  int64_t rows = 0;
  for (const TensorSpec* weight : recurrent_weights(graph, node)) rows += weight->sizes[0];
  const auto element =
      static_cast<int64_t>(c10::elementSize(spec_of_argument(graph, node, 0).dtype));
  return rows * recurrent_positions(graph, node) * element;
}

/// About ten leaf kernels per step and pair of weights (input projections of a layer are one
/// product).
double recurrent_kernels(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  const size_t pairs = recurrent_weights(graph, node).size() / 2;
  if (input.sizes.size() < 2) return 10 * static_cast<double>(pairs);
  return 10 * static_cast<double>(pairs) *
         static_cast<double>(std::max(input.sizes[0], input.sizes[1]));
}

int64_t pooling_indices_bytes(const Graph& graph, const Node& node) {
  const bool has_output = !node.outputs.empty() && node.outputs[0] != kNoValue;
  return has_output ? 8 * graph.values[node.outputs[0]].spec.num_elements() : 0;
}

int64_t bytes_of_first_input(const Graph& graph, const Node& node) {
  return spec_of_argument(graph, node, 0).num_bytes();
}

/// cross_entropy_loss keeps the log-softmax that it makes inside; with probabilities as targets
/// also the factors of the products.
int64_t cross_entropy_saved_bytes(const Graph& graph, const Node& node) {
  const bool has_indices = c10::isIntegralType(spec_of_argument(graph, node, 1).dtype, false);
  return bytes_of_first_input(graph, node) * (has_indices ? 1 : 3);
}

/// dropout is input * noise, and the input itself where nothing is dropped.
int64_t dropout_saved_bytes(const Graph& graph, const Node& node) {
  const auto is = [&](size_t position, const auto& wanted) {
    const auto* argument =
        position < node.arguments.size()
            ? std::get_if<std::decay_t<decltype(wanted)>>(&node.arguments[position])
            : nullptr;
    return argument != nullptr && *argument == wanted;
  };
  return is(1, 0.0) || is(2, false) ? 0 : bytes_of_first_output(graph, node);
}

/// Mean and deviation of every normalised row. Arguments of aten::layer_norm: input, normalised
/// sizes.
int64_t row_statistics_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  int64_t row = last_size(input);
  if (const auto* sizes = node.arguments.size() > 1
                              ? std::get_if<std::vector<int64_t>>(&node.arguments[1])
                              : nullptr) {
    row = 1;
    for (int64_t size : *sizes) row *= size;
  }
  return row == 0 ? 0 : 2 * input.num_bytes() / row;
}

/// Mean and deviation of every channel.
int64_t channel_statistics_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  const auto element = static_cast<int64_t>(c10::elementSize(input.dtype));
  return input.sizes.size() < 2 ? 0 : 2 * element * input.sizes[1];
}

// Rows are written as they are read: name, then only what differs from "moves its bytes once".
// clang-format off
const OperatorRow kRows[] = {
    // Matrix products.
    {.op = "aten::mm", .flops = product_flops<0>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::bmm", .flops = product_flops<0>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::mv", .flops = product_flops<0>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::dot", .flops = product_flops<0>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::matmul", .flops = product_flops<0>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::linear", .flops = product_flops<0>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::addmm", .flops = product_flops<1>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::addmv", .flops = product_flops<1>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::addbmm", .flops = product_flops<1>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::baddbmm", .flops = product_flops<1>, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::einsum", .flops = einsum_flops, .saves = kSavesOperands, .is_product = true},
    // Convolutions.
    {.op = "aten::conv1d", .flops = convolution_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::conv2d", .flops = convolution_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::conv3d", .flops = convolution_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::convolution", .flops = convolution_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::conv_transpose1d", .flops = convolution_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::conv_transpose2d", .flops = convolution_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::conv_transpose3d", .flops = convolution_flops, .saves = kSavesOperands, .is_product = true},
    // Composites with products inside.
    {.op = "aten::scaled_dot_product_attention", .flops = attention_flops, .backward_factor = 2.5,
     .saves = kSavesInputs | kSavesOutputs, .extra_saved_bytes = attention_saved_bytes},
    {.op = "aten::lstm", .flops = recurrent_flops, .backward_factor = 2, .saves = kSavesInputs | kSavesOutputs,
     .extra_saved_bytes = recurrent_saved_bytes, .kernels = recurrent_kernels},
    {.op = "aten::gru", .flops = recurrent_flops, .backward_factor = 2, .saves = kSavesInputs | kSavesOutputs,
     .extra_saved_bytes = recurrent_saved_bytes, .kernels = recurrent_kernels},
    {.op = "aten::rnn_tanh", .flops = recurrent_flops, .backward_factor = 2, .saves = kSavesInputs | kSavesOutputs,
     .extra_saved_bytes = recurrent_saved_bytes, .kernels = recurrent_kernels},
    {.op = "aten::rnn_relu", .flops = recurrent_flops, .backward_factor = 2, .saves = kSavesInputs | kSavesOutputs,
     .extra_saved_bytes = recurrent_saved_bytes, .kernels = recurrent_kernels},
    // Look-ups read and write rows of argument 0; their backward fills a gradient as large as all
    // of it.
    {.op = "aten::embedding", .saves = kSavesIndices, .is_lookup = true},
    {.op = "aten::index", .saves = kSavesIndices, .is_lookup = true},
    {.op = "aten::index_select", .saves = kSavesIndices, .is_lookup = true},
    {.op = "aten::gather", .saves = kSavesIndices, .is_lookup = true},
    // Normalisation.
    {.op = "aten::batch_norm", .backward_factor = 1.5, .saves = kSavesInputs,
     .extra_saved_bytes = channel_statistics_bytes},
    {.op = "aten::native_batch_norm", .backward_factor = 1.5, .saves = kSavesInputs},
    {.op = "aten::layer_norm", .backward_factor = 1.5, .transcendentals_per_element = 1, .saves = kSavesInputs,
     .extra_saved_bytes = row_statistics_bytes},
    {.op = "aten::native_layer_norm", .backward_factor = 1.5, .transcendentals_per_element = 1,
     .saves = kSavesInputs},
    {.op = "aten::group_norm", .backward_factor = 1.5, .transcendentals_per_element = 1, .saves = kSavesInputs},
    {.op = "aten::instance_norm", .backward_factor = 1.5, .saves = kSavesInputs},
    {.op = "aten::rms_norm", .backward_factor = 1.5, .transcendentals_per_element = 1, .saves = kSavesInputs},
    // Random numbers.
    {.op = "aten::dropout", .randoms_per_element = 1, .extra_saved_bytes = dropout_saved_bytes},
    {.op = "aten::native_dropout", .randoms_per_element = 1, .saves = kSavesOutputs},
    {.op = "aten::alpha_dropout", .randoms_per_element = 1, .extra_saved_bytes = dropout_saved_bytes},
    {.op = "aten::bernoulli", .randoms_per_element = 1},
    {.op = "aten::rand", .randoms_per_element = 1},
    {.op = "aten::randn", .randoms_per_element = 2},
    {.op = "aten::rand_like", .randoms_per_element = 1},
    {.op = "aten::randn_like", .randoms_per_element = 2},
    {.op = "aten::normal", .randoms_per_element = 2},
    {.op = "aten::uniform", .randoms_per_element = 1},
    // Element by element, with a function to evaluate.
    {.op = "aten::softmax", .transcendentals_per_element = 2, .saves = kSavesOutputs},
    {.op = "aten::_softmax", .transcendentals_per_element = 2, .saves = kSavesOutputs},
    {.op = "aten::log_softmax", .transcendentals_per_element = 2, .saves = kSavesOutputs},
    {.op = "aten::_log_softmax", .transcendentals_per_element = 2, .saves = kSavesOutputs},
    {.op = "aten::exp", .transcendentals_per_element = 1, .saves = kSavesOutputs},
    {.op = "aten::tanh", .transcendentals_per_element = 1, .saves = kSavesOutputs},
    {.op = "aten::sigmoid", .transcendentals_per_element = 1, .saves = kSavesOutputs},
    {.op = "aten::sqrt", .transcendentals_per_element = 1, .saves = kSavesOutputs},
    {.op = "aten::rsqrt", .transcendentals_per_element = 1, .saves = kSavesOutputs},
    {.op = "aten::gelu", .transcendentals_per_element = 1.5, .saves = kSavesInputs},
    {.op = "aten::silu", .transcendentals_per_element = 1, .saves = kSavesInputs},
    {.op = "aten::log", .transcendentals_per_element = 1, .saves = kSavesInputs},
    {.op = "aten::sin", .transcendentals_per_element = 1, .saves = kSavesInputs},
    {.op = "aten::cos", .transcendentals_per_element = 1, .saves = kSavesInputs},
    {.op = "aten::pow", .transcendentals_per_element = 1, .saves = kSavesInputs},
    {.op = "aten::elu", .transcendentals_per_element = 1, .saves = kSavesInputs},
    {.op = "aten::softplus", .transcendentals_per_element = 1, .saves = kSavesInputs},
    // Element by element.
    {.op = "aten::relu", .saves = kSavesOutputs},
    {.op = "aten::add", .gradient = GradientForm::kSame},
    {.op = "aten::sub"}, {.op = "aten::rsub"}, {.op = "aten::neg"},
    {.op = "aten::mul", .saves = kSavesOperands},
    {.op = "aten::div", .transcendentals_per_element = 0.5, .saves = kSavesOperands},
    {.op = "aten::masked_fill", .saves = kSavesIndices},
    {.op = "aten::where", .saves = kSavesIndices},
    // Data movement, reductions.
    {.op = "aten::clone", .gradient = GradientForm::kSame},
    {.op = "aten::contiguous", .gradient = GradientForm::kSame},
    {.op = "aten::to", .gradient = GradientForm::kSame},
    {.op = "aten::sum", .gradient = GradientForm::kExpanded},
    {.op = "aten::copy"}, {.op = "aten::cat"}, {.op = "aten::stack"}, {.op = "aten::mean"},
    {.op = "aten::fill"}, {.op = "aten::zero"}, {.op = "aten::pad"}, {.op = "aten::constant_pad_nd"},
    {.op = "aten::zeros"}, {.op = "aten::ones"}, {.op = "aten::full"}, {.op = "aten::arange"},
    {.op = "aten::zeros_like"}, {.op = "aten::ones_like"}, {.op = "aten::full_like"},
    {.op = "aten::avg_pool2d", .saves = kSavesInputs},
    {.op = "aten::adaptive_avg_pool2d"},
    {.op = "aten::max_pool1d", .saves = kSavesInputs, .extra_saved_bytes = pooling_indices_bytes},
    {.op = "aten::max_pool2d", .saves = kSavesInputs, .extra_saved_bytes = pooling_indices_bytes},
    {.op = "aten::max_pool3d", .saves = kSavesInputs, .extra_saved_bytes = pooling_indices_bytes},
    // Losses.
    {.op = "aten::nll_loss", .saves = kSavesInputs},
    {.op = "aten::nll_loss_nd", .saves = kSavesInputs},
    {.op = "aten::cross_entropy_loss", .transcendentals_per_element = 2, .saves = kSavesIndices,
     .extra_saved_bytes = cross_entropy_saved_bytes, .backward_workspace_bytes = bytes_of_first_input},
    // Views move nothing.
    {.op = "aten::view", .is_view = true}, {.op = "aten::_unsafe_view", .is_view = true},
    {.op = "aten::reshape", .is_view = true}, {.op = "aten::flatten", .is_view = true},
    {.op = "aten::unflatten", .is_view = true}, {.op = "aten::t", .is_view = true},
    {.op = "aten::transpose", .is_view = true}, {.op = "aten::permute", .is_view = true},
    {.op = "aten::expand", .is_view = true}, {.op = "aten::expand_as", .is_view = true},
    {.op = "aten::view_as", .is_view = true}, {.op = "aten::squeeze", .is_view = true},
    {.op = "aten::unsqueeze", .is_view = true}, {.op = "aten::select", .is_view = true},
    {.op = "aten::slice", .is_view = true}, {.op = "aten::narrow", .is_view = true},
    {.op = "aten::chunk", .is_view = true}, {.op = "aten::split", .is_view = true},
    {.op = "aten::split_with_sizes", .is_view = true}, {.op = "aten::unbind", .is_view = true},
    {.op = "aten::alias", .is_view = true}, {.op = "aten::detach", .is_view = true},
    {.op = "aten::as_strided", .is_view = true}, {.op = "aten::diagonal", .is_view = true},
    {.op = "aten::unfold", .is_view = true}, {.op = "aten::movedim", .is_view = true},
    {.op = "aten::swapaxes", .is_view = true}, {.op = "aten::numpy_T", .is_view = true},
    {.op = "aten::lift_fresh", .is_view = true}, {.op = "aten::empty", .is_view = true},
    {.op = "aten::empty_like", .is_view = true}, {.op = "aten::new_empty", .is_view = true},
};
// clang-format on

}  // namespace

const OperatorRow& operator_row(const Node& node) {
  static const std::map<std::string_view, const OperatorRow*> rows_by_op = [] {
    std::map<std::string_view, const OperatorRow*> rows;
    for (const OperatorRow& row : kRows) rows[row.op] = &row;
    return rows;
  }();
  static const OperatorRow kOtherwise{.op = "", .saves = kSavesInputs};
  std::string_view op = node.op;
  auto row = rows_by_op.find(op);
  if (row == rows_by_op.end() && !op.empty() && op.back() == '_') {
    op.remove_suffix(1);
    row = rows_by_op.find(op);
  }
  return row == rows_by_op.end() ? kOtherwise : *row->second;
}

}  // namespace smp::partitioner
