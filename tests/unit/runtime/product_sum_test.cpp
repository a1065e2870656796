// Products that are added to a gradient at once have the bits of a product and an addition, or are left alone.
#include "runtime/stage/product_sum.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace smp::runtime {
namespace {

ProductForm form_of(const at::Tensor& left, const at::Tensor& right) {
  return {.rows = left.size(0), .inner = left.size(1), .columns = right.size(1), .left_strides = {left.stride(0), left.stride(1)},
          .right_strides = {right.stride(0), right.stride(1)}, .dtype = left.scalar_type()};
}

/// A leaf whose gradient is random, or none.
at::Tensor parameter(int64_t rows, int64_t columns, bool has_gradient = true) {
  at::Tensor made = at::ones({rows, columns}).set_requires_grad(true);
  if (has_gradient) made.mutable_grad() = at::randn({rows, columns});
  return made;
}

TEST(ProductSum, HasTheBitsOfAProductAndAnAddition) {
  int num_alike = 0;
  for (const int64_t rows : {8, 24, 64, 200}) {
    for (const int64_t columns : {8, 40, 512}) {
      for (const int64_t inner : {1, 4, 32, 140, 1024}) {
        for (const bool is_transposed : {false, true}) {
          const at::Tensor left = is_transposed ? at::randn({inner, rows}).t() : at::randn({rows, inner});
          const at::Tensor right = at::randn({inner, columns});
          if (!product_adds_up_alike(form_of(left, right))) continue;
          ++num_alike;
          for (int i = 0; i < 20; ++i) {
            const at::Tensor a = at::randn_like(left), b = at::randn_like(right), weight = parameter(rows, columns);
            const at::Tensor expected = weight.grad().clone().add_(at::mm(a, b));
            EXPECT_TRUE(add_product_to_grad(weight, a, b));
            EXPECT_TRUE(weight.grad().equal(expected)) << rows << " x " << inner << " x " << columns;
          }
        }
      }
    }
  }
  EXPECT_GT(num_alike, 0);
}

TEST(ProductSum, IsNotTriedWhereItTakesTooMuchOrKernelsRoundOtherwise) {
  const ProductForm plain = form_of(at::ones({64, 32}), at::ones({32, 64}));
  ProductForm large = plain, half = plain, spread = plain, repeated = plain, empty = plain, odd = plain, deep = plain;
  large.rows = int64_t{1} << 40;
  half.dtype = at::kHalf;
  spread.left_strides = {64, 2};
  repeated.right_strides = {0, 1};
  empty.inner = 0;
  odd.columns = 63;
  deep.inner = int64_t{1} << 20;
  for (const ProductForm& form : {large, half, spread, repeated, empty, odd, deep}) EXPECT_FALSE(product_adds_up_alike(form));
}

struct Waiting : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    return outputs;
  }
};

TEST(ProductSum, LeavesGradientsAloneThatAreNoPlainSums) {
  const at::Tensor left = at::randn({4, 2}), right = at::randn({2, 3});
  const auto expect_refused = [](const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b, const char* what) {
    const at::Tensor before = weight.grad().defined() ? weight.grad().clone() : at::Tensor();
    EXPECT_FALSE(add_product_to_grad(weight, a, b)) << what;
    EXPECT_EQ(weight.grad().defined(), before.defined()) << what;
    if (before.defined()) {
      EXPECT_TRUE(weight.grad().equal(before)) << what;
    }
  };
  expect_refused(parameter(4, 3, /*has_gradient=*/false), left, right, "none yet");

  const at::Tensor transposed = parameter(4, 3);
  transposed.mutable_grad() = at::randn({3, 4}).t();
  expect_refused(transposed, left, right, "another layout");

  const at::Tensor other = parameter(4, 3);
  expect_refused(other, left.to(at::kDouble), right.to(at::kDouble), "another type");

  const at::Tensor shared = parameter(3, 3);
  expect_refused(shared, shared.grad(), at::randn({3, 3}), "a factor on the gradient's memory");

  const at::Tensor watched = parameter(4, 3);
  const auto accumulator = torch::autograd::impl::grad_accumulator(watched);
  accumulator->add_post_hook(std::make_unique<Waiting>());
  expect_refused(watched, left, right, "a hook that waits");
}

}  // namespace
}  // namespace smp::runtime
