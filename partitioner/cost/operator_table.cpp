// The table of operators. Composites appear as they are recorded: undecomposed.
#include "partitioner/cost/operator_table.h"

#include <unordered_map>

#include "partitioner/cost/library_memory.h"
#include "partitioner/cost/operator_formulas.h"

namespace smp::partitioner {
namespace {

constexpr OperatorRow convolution(std::string_view op) {
  return {.op = op,
          .flops = convolution_flops,
          .saves = kSavesOperands,
          .workspace_bytes = convolution_workspace_bytes,
          .backward_workspace_bytes = convolution_backward_workspace_bytes,
          .is_product = true};
}

constexpr OperatorRow gated(std::string_view op, decltype(OperatorRow::flops) flops,
                            decltype(OperatorRow::extra_saved_bytes) saved_bytes, decltype(OperatorRow::kernels) kernels) {
  return {.op = op,
          .flops = flops,
          .backward_factor = 2,
          .saves = kSavesInputs | kSavesOutputs,
          .extra_saved_bytes = saved_bytes,
          .kernels = kernels};
}

constexpr OperatorRow recurrent(std::string_view op) {
  return gated(op, recurrent_flops, recurrent_saved_bytes, recurrent_kernels);
}

constexpr OperatorRow cell(std::string_view op) { return gated(op, cell_flops, cell_saved_bytes, cell_kernels); }

constexpr OperatorRow view(std::string_view op) { return {.op = op, .is_view = true}; }

// Rows are written as they are read: name, then only what differs from "moves its bytes once".
// clang-format off
const OperatorRow kRows[] = {
    // Matrix products.
    {.op = "aten::mm", .flops = product_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::bmm", .flops = product_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::mv", .flops = product_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::dot", .flops = product_flops, .saves = kSavesOperands, .is_product = true},
    {.op = "aten::matmul", .flops = product_flops, .saves = kSavesOperands,
     .extra_saved_bytes = folded_copy_bytes, .num_copies = folded_copies,
     .is_product = true},
    {.op = "aten::linear", .flops = product_flops, .saves = kSavesOperands,
     .extra_saved_bytes = folded_copy_bytes, .num_copies = folded_copies,
     .is_product = true},
    {.op = "aten::addmm", .flops = added_product_flops, .saves = kSavesOperands, .is_product = true,
     .first_factor = 1},
    {.op = "aten::addmv", .flops = added_product_flops, .saves = kSavesOperands, .is_product = true,
     .first_factor = 1},
    {.op = "aten::addbmm", .flops = summed_batch_flops, .saves = kSavesOperands, .is_product = true,
     .first_factor = 1},
    {.op = "aten::baddbmm", .flops = added_product_flops, .saves = kSavesOperands,
     .is_product = true,
     .first_factor = 1},
    {.op = "aten::tensordot", .flops = tensordot_flops, .saves = kSavesOperands,
     .is_product = true},
    {.op = "aten::bilinear", .flops = bilinear_flops, .saves = kSavesOperands, .is_product = true,
     .num_factors = 3},
    {.op = "aten::chain_matmul", .flops = matrix_chain_flops, .backward_factor = 2,
     .saves = kSavesInputs},
    {.op = "aten::linalg_multi_dot", .flops = matrix_chain_flops, .backward_factor = 2,
     .saves = kSavesInputs},
    {.op = "aten::cdist", .flops = product_flops, .backward_factor = 2,
     .saves = kSavesInputs | kSavesOutputs},
    {.op = "aten::_cdist_forward", .flops = product_flops, .backward_factor = 2,
     .saves = kSavesInputs | kSavesOutputs},
    {.op = "aten::einsum", .flops = einsum_flops, .saves = kSavesOperands, .is_product = true,
     .first_factor = 1, .num_factors = 1},
    // Convolutions.
    convolution("aten::conv1d"), convolution("aten::conv2d"), convolution("aten::conv3d"),
    convolution("aten::convolution"), convolution("aten::conv_transpose1d"),
    convolution("aten::conv_transpose2d"), convolution("aten::conv_transpose3d"),
    // Composites with products inside.
    {.op = "aten::scaled_dot_product_attention", .flops = attention_flops, .backward_factor = 2.5,
     .saves = kSavesInputs | kSavesOutputs, .extra_saved_bytes = attention_saved_bytes,
     .num_copies = attention_copies},
    {.op = "aten::lstm", .flops = recurrent_flops, .backward_factor = 2,
     .saves = kSavesInputs | kSavesOutputs,
     .extra_saved_bytes = lstm_saved_bytes, .workspace_bytes = lstm_workspace_bytes,
     .backward_workspace_bytes = lstm_backward_workspace_bytes, .kernels = recurrent_kernels},
    recurrent("aten::gru"), recurrent("aten::rnn_tanh"), recurrent("aten::rnn_relu"),
    cell("aten::lstm_cell"), cell("aten::gru_cell"), cell("aten::rnn_tanh_cell"), cell("aten::rnn_relu_cell"),
    // Look-ups read and write rows of argument 0; their backward fills a gradient as large as all of it.
    {.op = "aten::embedding", .saves = kSavesIndices, .is_lookup = true},
    {.op = "aten::index", .saves = kSavesIndices, .is_lookup = true},
    {.op = "aten::index_select", .saves = kSavesIndices, .is_lookup = true},
    {.op = "aten::gather", .saves = kSavesIndices, .is_lookup = true},
    // Normalisation.
    {.op = "aten::batch_norm", .backward_factor = 1.5, .saves = kSavesInputs,
     .extra_saved_bytes = channel_statistics_bytes},
    {.op = "aten::native_batch_norm", .backward_factor = 1.5, .saves = kSavesInputs},
    {.op = "aten::layer_norm", .backward_factor = 1.5, .transcendentals_per_element = 1,
     .saves = kSavesInputs,
     .extra_saved_bytes = row_statistics_bytes, .workspace_bytes = row_copy_bytes,
     .backward_workspace_bytes = row_copy_bytes},
    {.op = "aten::native_layer_norm", .backward_factor = 1.5, .transcendentals_per_element = 1,
     .saves = kSavesInputs},
    {.op = "aten::group_norm", .backward_factor = 1.5, .transcendentals_per_element = 1,
     .saves = kSavesInputs, .extra_saved_bytes = group_statistics_bytes},
    {.op = "aten::instance_norm", .backward_factor = 1.5, .saves = kSavesInputs},
    {.op = "aten::rms_norm", .backward_factor = 1.5, .transcendentals_per_element = 1,
     .saves = kSavesInputs},
    // Random numbers.
    {.op = "aten::dropout", .randoms_per_element = 1, .extra_saved_bytes = dropout_saved_bytes},
    {.op = "aten::native_dropout", .randoms_per_element = 1, .saves = kSavesOutputs},
    {.op = "aten::alpha_dropout", .randoms_per_element = 1,
     .extra_saved_bytes = dropout_saved_bytes},
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
    {.op = "aten::pow", .transcendentals_per_element = 1, .saves = kSavesInputs,
     .backward_workspace_bytes = twice_bytes_of_first_input},
    {.op = "aten::elu", .transcendentals_per_element = 1, .saves = kSavesInputs},
    {.op = "aten::softplus", .transcendentals_per_element = 1, .saves = kSavesInputs},
    // Element by element.
    {.op = "aten::relu", .saves = kSavesOutputs},
    {.op = "aten::add", .gradient = GradientForm::kSame},
    {.op = "aten::sub"}, {.op = "aten::rsub"}, {.op = "aten::neg"},
    {.op = "aten::mul", .saves = kSavesOperands},
    {.op = "aten::div", .transcendentals_per_element = 0.5, .saves = kSavesOperands,
     .backward_workspace_bytes = quotient_backward_bytes},
    {.op = "aten::masked_fill", .saves = kSavesIndices},
    {.op = "aten::where", .saves = kSavesIndices},
    // Data movement, reductions.
    {.op = "aten::clone", .gradient = GradientForm::kSame},
    {.op = "aten::contiguous", .gradient = GradientForm::kSame, .may_be_view = true},
    {.op = "aten::to", .gradient = GradientForm::kSame, .may_be_view = true},
    {.op = "aten::type_as", .gradient = GradientForm::kSame, .may_be_view = true},
    {.op = "aten::reshape", .gradient = GradientForm::kSame, .may_be_view = true},
    {.op = "aten::reshape_as", .gradient = GradientForm::kSame, .may_be_view = true},
    {.op = "aten::flatten", .gradient = GradientForm::kSame, .may_be_view = true},
    {.op = "aten::ravel", .gradient = GradientForm::kSame, .may_be_view = true},
    {.op = "aten::sum", .workspace_bytes = converted_bytes, .gradient = GradientForm::kExpanded},
    {.op = "aten::copy"}, {.op = "aten::cat"}, {.op = "aten::stack"}, {.op = "aten::mean"},
    {.op = "aten::fill"}, {.op = "aten::zero"}, {.op = "aten::pad"},
    {.op = "aten::constant_pad_nd"},
    {.op = "aten::zeros"}, {.op = "aten::ones"}, {.op = "aten::full"}, {.op = "aten::arange"},
    {.op = "aten::zeros_like"}, {.op = "aten::ones_like"}, {.op = "aten::full_like"},
    {.op = "aten::avg_pool2d", .saves = kSavesInputs},
    {.op = "aten::adaptive_avg_pool2d"},
    {.op = "aten::max_pool1d", .saves = kSavesInputs, .extra_saved_bytes = pooling_indices_bytes},
    {.op = "aten::max_pool2d", .saves = kSavesInputs, .extra_saved_bytes = pooling_indices_bytes},
    {.op = "aten::max_pool3d", .saves = kSavesInputs, .extra_saved_bytes = pooling_indices_bytes},
    // Losses.
    {.op = "aten::binary_cross_entropy", .transcendentals_per_element = 2, .saves = kSavesInputs,
     .output_storage_bytes = bytes_of_first_input},
    {.op = "aten::binary_cross_entropy_with_logits", .transcendentals_per_element = 2,
     .saves = kSavesInputs, .workspace_bytes = twice_bytes_of_first_input},
    {.op = "aten::smooth_l1_loss", .saves = kSavesInputs,
     .output_storage_bytes = bytes_of_first_input},
    {.op = "aten::huber_loss", .saves = kSavesInputs, .output_storage_bytes = bytes_of_first_input},
    {.op = "aten::mse_loss", .saves = kSavesInputs, .output_storage_bytes = bytes_of_first_input},
    {.op = "aten::upsample_bilinear2d", .workspace_bytes = input_and_output_bytes},
    {.op = "aten::upsample_nearest2d", .workspace_bytes = input_and_output_bytes},
    {.op = "aten::nll_loss", .saves = kSavesInputs},
    {.op = "aten::nll_loss_nd", .saves = kSavesInputs},
    {.op = "aten::cross_entropy_loss", .transcendentals_per_element = 2, .saves = kSavesIndices,
     .extra_saved_bytes = cross_entropy_saved_bytes,
     .backward_workspace_bytes = bytes_of_first_input},
    {.op = "aten::cosine_similarity", .saves = kSavesInputs, .extra_saved_bytes = cosine_saved_bytes,
     .workspace_bytes = cosine_workspace_bytes, .backward_workspace_bytes = cosine_workspace_bytes},
    {.op = "aten::cosine_embedding_loss", .saves = kSavesInputs, .extra_saved_bytes = cosine_loss_saved_bytes,
     .workspace_bytes = cosine_loss_workspace_bytes, .backward_workspace_bytes = cosine_loss_workspace_bytes},
    // Views move nothing.
    view("aten::view"), view("aten::_unsafe_view"), view("aten::unflatten"), view("aten::t"),
    view("aten::transpose"), view("aten::permute"), view("aten::expand"), view("aten::expand_as"),
    view("aten::view_as"), view("aten::squeeze"), view("aten::unsqueeze"), view("aten::select"),
    view("aten::slice"), view("aten::narrow"), view("aten::chunk"), view("aten::split"),
    view("aten::split_with_sizes"), view("aten::unbind"), view("aten::alias"), view("aten::detach"),
    view("aten::as_strided"), view("aten::diagonal"), view("aten::unfold"), view("aten::movedim"),
    view("aten::swapaxes"), view("aten::numpy_T"), view("aten::lift_fresh"), view("aten::empty"),
    view("aten::empty_like"), view("aten::new_empty"),
};
// clang-format on

}  // namespace

const OperatorRow& operator_row(const Node& node) {
  static const std::unordered_map<std::string_view, const OperatorRow*> rows_by_op = [] {
    std::unordered_map<std::string_view, const OperatorRow*> rows;
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

bool moves_nothing(const Graph& graph, const Node& node) {
  const OperatorRow& row = operator_row(node);
  if (row.is_view || !row.may_be_view) return row.is_view;
  const auto* base = node.arguments.empty() ? nullptr : std::get_if<ValueRef>(&node.arguments.front());
  if (base == nullptr || base->id == kNoValue || node.outputs.empty()) return false;
  const int32_t storage = graph.values[base->id].storage;
  const ValueId output = node.outputs.front();
  return storage >= 0 && output != kNoValue && graph.values[output].storage == storage;
}

}  // namespace smp::partitioner
