// Products that are nothing but a parameter's gradient, added to it in one call: the kernel that multiplies adds up as well,
// where LibTorch writes the product to memory of its own first, and reads it again.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <compare>
#include <cstdint>

namespace smp::runtime {

/// Of a matrix product: left [rows, inner] x right [inner, columns].
struct ProductForm {
  int64_t rows = 0, inner = 0, columns = 0;
  std::array<int64_t, 2> left_strides{}, right_strides{};
  c10::ScalarType dtype = c10::ScalarType::Float;

  auto operator<=>(const ProductForm&) const = default;
};

/// Whether such products, added at once, give the bits of a product and an addition; tried once for each form and number of
/// threads. Kernels that cut a long inner dimension into parts add each to the sum, which rounds otherwise. False, untried,
/// for other than float and double, for products whose sides are no multiples of 8, where product or factors have more than
/// 4 M numbers, since a trial takes as much memory, and for factors of which neither rows nor columns are contiguous.
bool product_adds_up_alike(const ProductForm& form);

/// parameter.grad += left x right. False, and nothing done, where there is no gradient yet or another thing than a plain sum
/// is to happen to it: one in another layout or type, on the memory of a factor, or that hooks wait for.
bool add_product_to_grad(const at::Tensor& parameter, const at::Tensor& left, const at::Tensor& right);

}  // namespace smp::runtime
