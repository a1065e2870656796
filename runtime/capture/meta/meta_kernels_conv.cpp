// Meta kernels of convolutions, pools and shuffles of pixels.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/ConvUtils.h>

#include "runtime/capture/meta/meta_kernels_table.h"

namespace smp::runtime::meta {
namespace {

using at::IntArrayRef;
using at::MemoryFormat;
using at::Tensor;

/// Of the 16-bit types, not every processor has oneDNN's kernels.
bool has_onednn_kernels(at::ScalarType type) {
  const auto ask = [](const char* op) {
    torch::jit::Stack stack;
    c10::Dispatcher::singleton().findSchemaOrThrow(op, "").callBoxed(stack);
    return stack.back().toBool();
  };
  static const bool has_bfloat16 = ask("mkldnn::_is_mkldnn_bf16_supported");
  static const bool has_half = ask("mkldnn::_is_mkldnn_fp16_supported");
  return type == at::kFloat || (type == at::kBFloat16 && has_bfloat16) || (type == at::kHalf && has_half);
}

/// The conditions under which LibTorch's CPU gives a 3-D convolution to oneDNN (ConvParams::use_mkldnn). Only there 3-D
/// results keep channels_last; in 2-D the native kernels keep it too.
bool runs_on_onednn(const Tensor& input, const Tensor& weight, bool is_strided, bool is_dilated, int64_t groups) {
  if (!at::globalContext().userEnabledMkldnn() || !has_onednn_kernels(input.scalar_type())) return false;
  if (input.scalar_type() != at::kFloat) return true;
  const int64_t last = weight.size(-1), before_last = weight.size(-2);
  const bool is_worth_it =
      is_strided || is_dilated || input.size(0) >= 16 || last != 1 || before_last != 1 || at::get_num_threads() > 1;
  const bool is_large = groups > 1 || (last > 3 && before_last > 3) || input.size(0) > 1 ||
                        input.size(0) * input.size(1) * input.size(2) * input.size(3) > 20480;
  return is_worth_it && is_large;
}

MemoryFormat convolution_format(const Tensor& input, const Tensor& weight, bool is_on_onednn) {
  const auto format = input.dim() == 5 ? MemoryFormat::ChannelsLast3d : MemoryFormat::ChannelsLast;
  const bool wants_channels_last = input.suggest_memory_format() == format || weight.suggest_memory_format() == format;
  const bool can_keep_it = input.dim() == 4 || is_on_onednn;
  return wants_channels_last && can_keep_it ? format : MemoryFormat::Contiguous;
}

/// What aten::convolution reaches on meta, after padding lists are expanded and 1-D inputs made 2-D.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& /*bias*/, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  const auto is_not_one = [](int64_t step) { return step != 1; };
  const bool is_on_onednn = runs_on_onednn(input, weight, std::any_of(stride.begin(), stride.end(), is_not_one),
                                           std::any_of(dilation.begin(), dilation.end(), is_not_one), groups);
  const auto sizes = transposed ? at::native::conv_input_size(input.sizes(), weight.sizes(), padding, output_padding, stride,
                                                              dilation, groups)
                                : at::native::conv_output_size(input.sizes(), weight.sizes(), padding, stride, dilation);
  return make(sizes, input.scalar_type(), convolution_format(input, weight, is_on_onednn));
}

/// Sizes of `input` with the last ones replaced by `window_sizes`.
at::DimVector with_last_sizes(const Tensor& input, IntArrayRef window_sizes) {
  TORCH_CHECK(input.dim() >= static_cast<int64_t>(window_sizes.size()), "expected an input with at least ",
              window_sizes.size(), " dimensions, got ", input.sizes());
  at::DimVector sizes(input.sizes());
  std::copy(window_sizes.begin(), window_sizes.end(), sizes.end() - window_sizes.size());
  return sizes;
}

Tensor adaptive_avg_pool2d(const Tensor& self, IntArrayRef output_size) {
  return make(with_last_sizes(self, output_size), self.scalar_type(), self.suggest_memory_format());
}

/// [..., c * factor^2, h, w] to [..., c, h * factor, w * factor]. LibTorch's composite loses
/// channels_last here, the CPU keeps it.
Tensor pixel_shuffle(const Tensor& self, int64_t factor) {
  TORCH_CHECK(self.dim() >= 3 && factor > 0 && self.size(-3) % (factor * factor) == 0,
              "pixel_shuffle(): expected [..., channels, h, w] with channels divisible by ", factor, "^2, got ",
              self.sizes());
  const auto sizes =
      with_last_sizes(self, {self.size(-3) / (factor * factor), self.size(-2) * factor, self.size(-1) * factor});
  return make(sizes, self.scalar_type(), self.suggest_memory_format());
}

/// The inverse of pixel_shuffle.
Tensor pixel_unshuffle(const Tensor& self, int64_t factor) {
  TORCH_CHECK(self.dim() >= 3 && factor > 0 && self.size(-2) % factor == 0 && self.size(-1) % factor == 0,
              "pixel_unshuffle(): expected [..., channels, h, w] with h and w divisible by ", factor, ", got ",
              self.sizes());
  const auto sizes =
      with_last_sizes(self, {self.size(-3) * factor * factor, self.size(-2) / factor, self.size(-1) / factor});
  return make(sizes, self.scalar_type(), self.suggest_memory_format());
}

}  // namespace

void add_convolutions_and_pools(Table& table) {
  // Not aten::convolution: a kernel there would take its place above and lose the 1-D case and empty batches.
  table.add("convolution_overrideable", &convolution);
  table.add("_adaptive_avg_pool2d", &adaptive_avg_pool2d);
  table.add("pixel_shuffle", &pixel_shuffle);
  table.add("pixel_unshuffle", &pixel_unshuffle);
}

}  // namespace smp::runtime::meta
