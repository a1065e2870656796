// Tests call_on_meta: composites that the CPU takes apart in its own way.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "runtime/capture/meta/meta_kernels.h"
#include "tests/unit/runtime/capture/meta/meta_kernels_test.h"

namespace smp::test {
namespace {

struct AttentionCase {
  const char* name;
  bool transposes_query;  // [batch, tokens, heads, width] seen as [batch, heads, tokens, width], as
                          // models do
  double dropout_p;
  bool is_causal;
  enum { kNoMask, kBoolMask, kFloatMask, kFloatMaskWithGradient } mask;
  at::ScalarType dtype = at::kFloat;
  int64_t num_key_heads = 4;
  int64_t value_width = 6;
};

at::Tensor attention(const AttentionCase& c, at::Device device) {
  const auto make = [&](int64_t heads, int64_t tokens, int64_t width) {
    const auto options = at::TensorOptions(device).dtype(c.dtype);
    return c.transposes_query ? at::ones({2, tokens, heads, width}, options).transpose(1, 2).requires_grad_()
                              : at::ones({2, heads, tokens, width}, options).requires_grad_();
  };
  std::optional<Tensor> mask;
  if (c.mask == AttentionCase::kBoolMask) mask = at::ones({5, 7}, at::TensorOptions(device).dtype(at::kBool));
  if (c.mask >= AttentionCase::kFloatMask) mask = at::ones({5, 7}, at::TensorOptions(device).dtype(c.dtype));
  if (c.mask == AttentionCase::kFloatMaskWithGradient) mask->requires_grad_();
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::scaled_dot_product_attention", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, make(4, 5, 6), make(c.num_key_heads, 7, 6), make(c.num_key_heads, 7, c.value_width), mask,
                   c.dropout_p, c.is_causal, c10::IValue(), c.num_key_heads != 4);
  runtime::call_on_meta(op, stack);
  return torch::jit::pop(stack).toTensor();
}

TEST_F(MetaKernels, AttentionHasTheStridesOfTheWayThatTheCpuTakes) {
  const std::vector<AttentionCase> cases = {
      {"fused", true, 0.0, false, AttentionCase::kNoMask},
      {"fused, contiguous", false, 0.0, false, AttentionCase::kNoMask},
      {"fused, causal", true, 0.0, true, AttentionCase::kNoMask},
      {"fused, boolean mask", true, 0.0, false, AttentionCase::kBoolMask},
      {"fused, float mask", true, 0.0, false, AttentionCase::kFloatMask},
      {"mask with gradient", true, 0.0, false, AttentionCase::kFloatMaskWithGradient},
      {"dropout", true, 0.1, false, AttentionCase::kNoMask},
      {"dropout, boolean mask", true, 0.1, false, AttentionCase::kBoolMask},
      {"bfloat16", true, 0.0, false, AttentionCase::kNoMask, at::kBFloat16},
      {"double", true, 0.0, false, AttentionCase::kNoMask, at::kDouble},
      {"grouped queries", true, 0.0, false, AttentionCase::kNoMask, at::kFloat, 2},
      {"wider values", true, 0.0, false, AttentionCase::kNoMask, at::kFloat, 4, 8},
  };
  for (const auto& c : cases) {
    const Tensor real = attention(c, at::kCPU), meta = attention(c, at::kMeta);
    EXPECT_EQ(real.sizes(), meta.sizes()) << c.name;
    EXPECT_EQ(real.strides(), meta.strides()) << c.name;
    EXPECT_EQ(real.scalar_type(), meta.scalar_type()) << c.name;
    EXPECT_TRUE(meta.requires_grad()) << c.name;
  }
}

TEST_F(MetaKernels, GroupNormKeepsChannelsLastThroughCallOnMeta) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::group_norm", "");
  for (const auto format : {at::MemoryFormat::ChannelsLast, at::MemoryFormat::Contiguous}) {
    const auto strides_on = [&](at::Device device) {
      torch::jit::Stack stack;
      torch::jit::push(stack, at::ones({2, 4, 5, 6}, device).contiguous(format).requires_grad_(), 2, at::ones({4}, device),
                       c10::IValue(), 1e-5, false);
      runtime::call_on_meta(op, stack);
      const Tensor result = torch::jit::pop(stack).toTensor();
      EXPECT_TRUE(result.requires_grad());
      return result.strides().vec();
    };
    EXPECT_EQ(strides_on(at::kCPU), strides_on(at::kMeta));
  }
}

TEST_F(MetaKernels, OneHotIsContiguousThroughCallOnMeta) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::one_hot", "");
  for (const bool transposes : {true, false}) {
    const auto result_on = [&](at::Device device) {
      const Tensor index = at::zeros({3, 2}, at::TensorOptions(device).dtype(at::kLong));
      torch::jit::Stack stack;
      torch::jit::push(stack, transposes ? index.t() : index, 4);
      runtime::call_on_meta(op, stack);
      return torch::jit::pop(stack).toTensor();
    };
    const Tensor real = result_on(at::kCPU), meta = result_on(at::kMeta);
    EXPECT_EQ(real.sizes(), meta.sizes());
    EXPECT_EQ(real.strides(), meta.strides());
    EXPECT_EQ(real.scalar_type(), meta.scalar_type());
  }
}

TEST_F(MetaKernels, CallOnMetaRunsEveryOtherOperatorAsItIs) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::relu", "");
  torch::jit::Stack stack{at::empty({2, 3}, at::kMeta)};
  runtime::call_on_meta(op, stack);
  EXPECT_EQ(torch::jit::pop(stack).toTensor().sizes(), at::IntArrayRef({2, 3}));
}

}  // namespace
}  // namespace smp::test
