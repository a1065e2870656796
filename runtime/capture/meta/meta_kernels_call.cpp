// The composites that LibTorch takes apart otherwise on meta than on the CPU: here they go the CPU's way.
#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/core/ivalue.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <tuple>

#include "runtime/capture/meta/meta_kernels.h"
#include "runtime/capture/meta/meta_kernels_table.h"
#include "runtime/device/device.h"

namespace smp::runtime {
namespace {

using at::Tensor;

/// The `index`-th of the call's arguments, which lie on top of the stack.
const c10::IValue& argument(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t index) {
  return torch::jit::peek(stack, index, op.schema().arguments().size());
}

void finish_call(const c10::OperatorHandle& op, torch::jit::Stack& stack, Tensor result) {
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.emplace_back(std::move(result));
}

/// The arguments of aten::scaled_dot_product_attention.
struct AttentionCall {
  Tensor query, key, value;  // [..., heads, tokens, width]
  std::optional<Tensor> mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
};

AttentionCall read_attention_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return {.query = argument(op, stack, 0).toTensor(),
          .key = argument(op, stack, 1).toTensor(),
          .value = argument(op, stack, 2).toTensor(),
          .mask = argument(op, stack, 3).toOptional<Tensor>(),
          .dropout_p = argument(op, stack, 4).toDouble(),
          .is_causal = argument(op, stack, 5).toBool(),
          .scale = argument(op, stack, 6).toOptional<double>(),
          .enable_gqa = argument(op, stack, 7).toBool()};
}

/// LibTorch turns a mask of booleans into one that is added to the scores.
std::optional<Tensor> additive_mask(const std::optional<Tensor>& mask, at::ScalarType dtype) {
  if (!mask.has_value() || mask->scalar_type() != at::kBool) return mask;
  const Tensor zeros = at::zeros_like(*mask, dtype);
  return at::where(*mask, zeros, at::full_like(zeros, -std::numeric_limits<double>::infinity()));
}

bool runs_fused_on_cpu(const AttentionCall& call) {
  const auto choice = at::native::_fused_sdp_choice_cpp(call.query, call.key, call.value, call.mask, call.dropout_p,
                                                        call.is_causal, call.scale, call.enable_gqa);
  return static_cast<sdp::SDPBackend>(choice) == sdp::SDPBackend::flash_attention;
}

/// Returns false, and leaves the stack alone, if the CPU too takes attention apart into matrix products.
bool attend_fused(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto call = read_attention_call(op, stack);
  if (!call.query.is_meta() || !runs_fused_on_cpu(call)) return false;
  finish_call(op, stack,
              std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
                  call.query, call.key, call.value, call.dropout_p, call.is_causal,
                  additive_mask(call.mask, call.query.scalar_type()), call.scale)));
  return true;
}

/// aten::group_norm makes its input contiguous first, on the CPU in the input's memory format.
/// Returns false where that format is the usual one.
bool normalize_groups_in_format(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const Tensor input = argument(op, stack, 0).toTensor();
  const auto format = input.suggest_memory_format();
  if (!input.is_meta() || format == at::MemoryFormat::Contiguous) return false;
  const int64_t num_groups = argument(op, stack, 1).toInt(), batch_size = input.size(0), num_channels = input.size(1);
  TORCH_CHECK(num_groups > 0 && num_channels % num_groups == 0, "group_norm(): expected channels divisible by the ",
              num_groups, " groups, got ", input.sizes());
  finish_call(op, stack,
              std::get<0>(at::native_group_norm(input.contiguous(format), argument(op, stack, 2).toOptional<Tensor>(),
                                                argument(op, stack, 3).toOptional<Tensor>(), batch_size, num_channels,
                                                input.numel() / std::max<int64_t>(batch_size * num_channels, 1), num_groups,
                                                argument(op, stack, 4).toDouble())));
  return true;
}

/// aten::one_hot keeps the strides of the index on meta; on the CPU its result is contiguous.
bool lay_out_one_hot(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const Tensor index = argument(op, stack, 0).toTensor();
  if (!index.is_meta() || index.is_contiguous()) return false;
  finish_call(op, stack, at::one_hot(index.contiguous(), argument(op, stack, 1).toInt()));
  return true;
}

/// How many questions about weights aten::cov still asks torch::equal on this thread, before the last one, whether there
/// are too few observations. Below 0: nothing asks.
thread_local int64_t num_weight_checks = -1;

bool asks_for_equality(const std::string& name) {
  return name == "aten::cov" || name == "aten::corrcoef" || name == "aten::quantile" || name == "aten::nanquantile";
}

int64_t weight_checks_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::string& name = op.operator_name().name;
  if (name == "aten::corrcoef") return 0;
  if (name == "aten::quantile" || name == "aten::nanquantile") return 1;
  const int64_t num_weights = static_cast<int64_t>(!argument(op, stack, 2).isNone()) + !argument(op, stack, 3).isNone();
  return num_weights == 0 ? 0 : num_weights + 1;
}

/// Neither a meta tensor nor what says that it is on the CPU and has no data.
bool has_values(const Tensor& tensor) { return data_of(tensor.storage()) != nullptr; }

/// lstm.data and its kin: as many sequences as the state has, and steps until all items are used up.
void assume_batch_sizes(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (op.operator_name().overload_name != "data" || op.schema().argumentIndexWithName("batch_sizes") != 1) return;
  c10::IValue& batch_sizes = stack.end()[1 - static_cast<ptrdiff_t>(op.schema().arguments().size())];
  if (has_values(batch_sizes.toTensor())) return;
  const c10::IValue& state = argument(op, stack, 2);
  const Tensor hidden = state.isTensorList() ? state.toTensorVector().at(0) : state.toTensor();
  const int64_t num_items = argument(op, stack, 0).toTensor().size(0), num_sequences = hidden.size(1);
  TORCH_CHECK_VALUE(num_sequences > 0 && num_items >= num_sequences, op.operator_name(), ": expected an item for each of ",
                    num_sequences, " sequences, got ", num_items);
  std::vector<int64_t> sizes(static_cast<size_t>(num_items / num_sequences), num_sequences);
  if (num_items % num_sequences > 0) sizes.push_back(num_items % num_sequences);
  batch_sizes = at::tensor(sizes, at::TensorOptions(host().type).dtype(at::kLong));
}

}  // namespace

AssumedValues::AssumedValues(const c10::OperatorHandle& op, torch::jit::Stack& stack)
    : outer_checks_(num_weight_checks), has_checks_(asks_for_equality(op.operator_name().name)) {
  if (has_checks_) num_weight_checks = weight_checks_of(op, stack);
  assume_batch_sizes(op, stack);
}

AssumedValues::~AssumedValues() {
  if (has_checks_) num_weight_checks = outer_checks_;
}

void call_on_meta(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const AssumedValues assumed(op, stack);
  static const auto attention = c10::Dispatcher::singleton().findSchemaOrThrow("aten::scaled_dot_product_attention", "");
  static const auto group_norm = c10::Dispatcher::singleton().findSchemaOrThrow("aten::group_norm", "");
  static const auto one_hot = c10::Dispatcher::singleton().findSchemaOrThrow("aten::one_hot", "");
  if (op == attention && attend_fused(op, stack)) return;
  if (op == group_norm && normalize_groups_in_format(op, stack)) return;
  if (op == one_hot && lay_out_one_hot(op, stack)) return;
  op.callBoxed(stack);
}

namespace meta {
namespace {

/// query: [batch, heads, tokens, width]. Results: the query's geometry, and log-sum-exp [batch,
/// heads, tokens], which the CPU lays out tokens before heads.
std::tuple<Tensor, Tensor> flash_attention(const Tensor& query, const Tensor& /*key*/, const Tensor& /*value*/,
                                           double /*dropout_p*/, bool /*is_causal*/, const std::optional<Tensor>& /*mask*/,
                                           std::optional<double> /*scale*/) {
  const int64_t batch_size = query.size(0), num_heads = query.size(1), num_tokens = query.size(2);
  const Tensor logsumexp(at::detail::empty_strided_meta(
      {batch_size, num_heads, num_tokens}, {num_tokens * num_heads, 1, num_heads}, at::toOpMathType(query.scalar_type())));
  return {make_like(query), logsumexp};
}

bool equal(const Tensor& /*self*/, const Tensor& /*other*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(num_weight_checks >= 0,
                              "aten::equal: the value of a tensor was read while its model is being captured. Read it "
                              "outside of the model, or compute with tensors instead (torch::where for a branch)");
  return num_weight_checks-- > 0;
}

}  // namespace

void add_attention(Table& table) {
  table.add("_scaled_dot_product_flash_attention_for_cpu", &flash_attention);
  table.add("equal", &equal);
}

}  // namespace meta
}  // namespace smp::runtime
