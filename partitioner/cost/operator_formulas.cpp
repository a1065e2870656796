// Work and memory of single operators from the sizes of their arguments.
#include "partitioner/cost/operator_formulas.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "partitioner/cost/argument_specs.h"

namespace smp::partitioner {
namespace {

double elements_of_outputs(const Graph& graph, const Node& node) {
  double elements = 0;
  for (ValueId id : node.outputs) {
    if (id != kNoValue) elements += static_cast<double>(graph.values[id].spec.num_elements());
  }
  return elements;
}

int64_t bytes_of_first_output(const Graph& graph, const Node& node) { return spec_of_output(graph, node).num_bytes(); }

int64_t last_size(const TensorSpec& spec) { return spec.sizes.empty() ? 1 : spec.sizes.back(); }

/// output elements x contracted dimension.
double product_flops_of(const Graph& graph, const Node& node, size_t left) {
  const auto contracted = static_cast<double>(last_size(spec_of_argument(graph, node, left)));
  return 2 * elements_of_outputs(graph, node) * contracted;
}

/// Whether attention runs as one kernel on CPU, which asks for (batch, heads, positions, features), equal heads, no dropout,
/// and a mask without gradient. (ATen/native/transformers/sdp_utils_cpp.cpp)
bool is_flash_attention(const Graph& graph, const Node& node) {
  const TensorSpec& query = spec_of_argument(graph, node, 0);
  for (size_t position : {1, 2}) {
    const TensorSpec& other = spec_of_argument(graph, node, position);
    if (query.sizes.size() != 4 || other.sizes.size() != 4) return false;
    if (other.sizes[0] != query.sizes[0] || other.sizes[1] != query.sizes[1]) return false;
    if (last_size(other) != last_size(query)) return false;
  }
  return argument_or(node, 4, 0.0) == 0 && !spec_of_argument(graph, node, 3).requires_grad;
}

int64_t num_rows(const TensorSpec& spec) { return last_size(spec) == 0 ? 0 : spec.num_elements() / last_size(spec); }

/// A number for each row.
int64_t row_bytes(const TensorSpec& spec) { return last_size(spec) == 0 ? 0 : spec.num_bytes() / last_size(spec); }

/// steps x batch of a recurrent layer's input (steps, batch, features) or (batch, steps, features).
int64_t recurrent_positions(const Graph& graph, const Node& node) { return num_rows(spec_of_argument(graph, node, 0)); }

/// Weights of all layers and directions: the two-dimensional members of the parameter list.
std::vector<const TensorSpec*> recurrent_weights(const Graph& graph, const Node& node) {
  std::vector<const TensorSpec*> weights;
  if (const auto* list = argument_if<ValueRefList>(node, 2)) {
    for (ValueId id : list->ids) {
      if (id != kNoValue && graph.values[id].spec.sizes.size() == 2) {
        weights.push_back(&graph.values[id].spec);
      }
    }
  }
  return weights;
}

}  // namespace

double product_flops(const Graph& graph, const Node& node) { return product_flops_of(graph, node, 0); }

double added_product_flops(const Graph& graph, const Node& node) { return product_flops_of(graph, node, 1); }

/// (b, n, m) x (b, m, p), summed over the batch into (n, p).
double summed_batch_flops(const Graph& graph, const Node& node) {
  return 2 * static_cast<double>(spec_of_argument(graph, node, 1).num_elements()) *
         static_cast<double>(last_size(spec_of_argument(graph, node, 2)));
}

/// Each element of the output meets every pair of elements of two rows.
double bilinear_flops(const Graph& graph, const Node& node) {
  const auto pairs =
      static_cast<double>(last_size(spec_of_argument(graph, node, 0)) * last_size(spec_of_argument(graph, node, 1)));
  return 2 * elements_of_outputs(graph, node) * pairs;
}

/// Arguments of aten::tensordot: self, other, the contracted dimensions of each.
double tensordot_flops(const Graph& graph, const Node& node) {
  const TensorSpec& self = spec_of_argument(graph, node, 0);
  const auto* dims = argument_if<std::vector<int64_t>>(node, 2);
  double contracted = 1;
  const auto rank = static_cast<int64_t>(self.sizes.size());
  for (size_t i = 0; dims != nullptr && rank > 0 && i < dims->size(); ++i) {
    contracted *= static_cast<double>(self.sizes[static_cast<size_t>(((*dims)[i] % rank + rank) % rank)]);
  }
  return 2 * elements_of_outputs(graph, node) * contracted;
}

/// From left to right; too large where another order is cheaper.
double matrix_chain_flops(const Graph& graph, const Node& node) {
  double flops = 0;
  const auto rows = static_cast<double>(size_or(spec_of_argument(graph, node, 0), 0, 1));
  bool is_first = true;
  for (ValueId id : node_inputs(node)) {
    if (!is_first) flops += 2 * rows * static_cast<double>(graph.values[id].spec.num_elements());
    is_first = false;
  }
  return flops;
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
  const bool is_transposed = node.op.find("transpose") != std::string::npos || argument_or(node, 6, false);
  // Every element of the output (transposed: of the input) meets the weights of one of its channels.
  const double elements = is_transposed ? static_cast<double>(spec_of_argument(graph, node, 0).num_elements())
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

/// One kernel keeps a float per query: the logarithm of the sum of its weights. Else copies of query, key and value stay,
/// and the weights, (batch x heads, queries, keys); with dropout also its noise and their product.
int64_t attention_saved_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& query = spec_of_argument(graph, node, 0);
  const TensorSpec& key = spec_of_argument(graph, node, 1);
  if (key.sizes.size() < 2 || last_size(query) == 0) return 0;
  constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));
  const int64_t num_queries = query.num_elements() / last_size(query);
  if (is_flash_attention(graph, node)) return kFloatBytes * num_queries;
  const int64_t weights = query.num_bytes() / last_size(query) * key.sizes[key.sizes.size() - 2];
  const bool drops = argument_or(node, 4, 0.0) > 0;
  return query.num_bytes() + key.num_bytes() + spec_of_argument(graph, node, 2).num_bytes() + weights * (drops ? 3 : 1);
}

int attention_copies(const Graph& graph, const Node& node) { return is_flash_attention(graph, node) ? 0 : 3; }

/// Whether the leading dimensions of `spec` are one to a view.
bool folds_to_rows(const TensorSpec& spec) {
  for (size_t d = 0; d + 2 < spec.sizes.size(); ++d) {
    if (spec.sizes[d] != 1 && spec.strides[d] != spec.strides[d + 1] * spec.sizes[d + 1]) {
      return false;
    }
  }
  return true;
}

/// matmul of three and more dimensions with a matrix folds its left side, into a copy where a view cannot do it.
int64_t folded_copy_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& left = spec_of_argument(graph, node, 0);
  const TensorSpec& right = spec_of_argument(graph, node, 1);
  const bool is_folded = left.sizes.size() > 2 && right.sizes.size() <= 2 && right.requires_grad;
  return is_folded && !folds_to_rows(left) ? left.num_bytes() : 0;
}

int folded_copies(const Graph& graph, const Node& node) { return folded_copy_bytes(graph, node) > 0 ? 1 : 0; }

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
  const auto element = static_cast<int64_t>(c10::elementSize(spec_of_argument(graph, node, 0).dtype));
  return rows * recurrent_positions(graph, node) * element;
}

/// Arguments of a cell: input, state, weight of the input, weight of the state.
double cell_flops(const Graph& graph, const Node& node) {
  const auto elements =
      static_cast<double>(spec_of_argument(graph, node, 2).num_elements() + spec_of_argument(graph, node, 3).num_elements());
  return 2 * elements * static_cast<double>(recurrent_positions(graph, node));
}

/// Gates before and after their nonlinearity.
int64_t cell_saved_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& weight = spec_of_argument(graph, node, 2);
  const auto element = static_cast<int64_t>(c10::elementSize(spec_of_argument(graph, node, 0).dtype));
  return 2 * size_or(weight, 0, 1) * recurrent_positions(graph, node) * element;
}

double cell_kernels(const Graph&, const Node&) { return 10; }

/// About ten leaf kernels per step and pair of weights (input projections of a layer are one product).
double recurrent_kernels(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  const size_t pairs = recurrent_weights(graph, node).size() / 2;
  if (input.sizes.size() < 2) return 10 * static_cast<double>(pairs);
  return 10 * static_cast<double>(pairs) * static_cast<double>(std::max(input.sizes[0], input.sizes[1]));
}

int64_t pooling_indices_bytes(const Graph& graph, const Node& node) {
  return 8 * spec_of_output(graph, node).num_elements();
}

int64_t bytes_of_first_input(const Graph& graph, const Node& node) { return spec_of_argument(graph, node, 0).num_bytes(); }

int64_t twice_bytes_of_first_input(const Graph& graph, const Node& node) { return 2 * bytes_of_first_input(graph, node); }

/// Interpolation works on contiguous copies of both.
int64_t input_and_output_bytes(const Graph& graph, const Node& node) {
  return bytes_of_first_input(graph, node) + bytes_of_first_output(graph, node);
}

/// A sum of other numbers than those that are added, such as one of truth values, converts them all first.
int64_t converted_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  const TensorSpec& sum = spec_of_output(graph, node);
  if (sum.num_elements() == 0 || input.dtype == sum.dtype) return 0;
  return input.num_elements() * (sum.num_bytes() / sum.num_elements());
}

/// Rows that do not lie one after another are copied together first.
int64_t row_copy_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  return std::is_sorted(input.strides.rbegin(), input.strides.rend()) ? 0 : input.num_bytes();
}

/// cross_entropy_loss keeps the log-softmax that it makes inside; with probabilities as targets
/// also the factors of the products.
int64_t cross_entropy_saved_bytes(const Graph& graph, const Node& node) {
  const bool has_indices = c10::isIntegralType(spec_of_argument(graph, node, 1).dtype, false);
  constexpr int64_t kTotalWeightBytes = 4;
  return bytes_of_first_input(graph, node) * (has_indices ? 1 : 3) + kTotalWeightBytes;
}

/// Products and squares of rows, their sums, root and quotient, and where the target is 1 and -1.
int64_t cosine_loss_saved_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  constexpr int64_t kTruthValues = 2;
  return 5 * row_bytes(input) + kTruthValues * num_rows(input);
}

/// One product of all elements at a time, and numbers of each row.
int64_t cosine_loss_workspace_bytes(const Graph& graph, const Node& node) {
  return bytes_of_first_input(graph, node) + 12 * row_bytes(spec_of_argument(graph, node, 0));
}

/// Both inputs divided by their norms, and their product.
int64_t cosine_workspace_bytes(const Graph& graph, const Node& node) {
  return 3 * bytes_of_first_input(graph, node) + 5 * row_bytes(spec_of_argument(graph, node, 0));
}

int64_t cosine_saved_bytes(const Graph& graph, const Node& node) {
  return 2 * bytes_of_first_input(graph, node) + 4 * row_bytes(spec_of_argument(graph, node, 0));
}

/// The gradient of a divisor is -grad * ((input / divisor) / divisor).
int64_t quotient_backward_bytes(const Graph& graph, const Node& node) {
  const auto* divisor = argument_if<ValueRef>(node, 1);
  const bool has_gradient = divisor != nullptr && graph.values[divisor->id].spec.requires_grad;
  return has_gradient ? 3 * bytes_of_first_output(graph, node) : 0;
}

/// dropout is input * noise, and the input itself where nothing is dropped.
int64_t dropout_saved_bytes(const Graph& graph, const Node& node) {
  const bool drops = argument_or(node, 1, 1.0) != 0 && argument_or(node, 2, true);
  return drops ? bytes_of_first_output(graph, node) : 0;
}

/// Mean and deviation of every normalised row. Arguments of aten::layer_norm: input, normalised sizes.
int64_t row_statistics_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  int64_t row = last_size(input);
  if (const auto* sizes = argument_if<std::vector<int64_t>>(node, 1)) {
    row = 1;
    for (int64_t size : *sizes) row *= size;
  }
  return row == 0 ? 0 : 2 * input.num_bytes() / row;
}

/// Mean and deviation of every group of every row. Arguments of aten::group_norm: input, groups.
int64_t group_statistics_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  const auto element = static_cast<int64_t>(c10::elementSize(input.dtype));
  return input.sizes.empty() ? 0 : 2 * element * input.sizes[0] * argument_or<int64_t>(node, 1, 1);
}

/// Mean and deviation of every channel.
int64_t channel_statistics_bytes(const Graph& graph, const Node& node) {
  const TensorSpec& input = spec_of_argument(graph, node, 0);
  const auto element = static_cast<int64_t>(c10::elementSize(input.dtype));
  return input.sizes.size() < 2 ? 0 : 2 * element * input.sizes[1];
}

}  // namespace smp::partitioner
