// Meta kernels of elementwise operators: result sizes by broadcasting, strides by TensorIterator.
#include <ATen/ScalarOps.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/result_type_native.h>
#include <ATen/ops/sub.h>

#include <tuple>

#include "runtime/capture/meta/meta_kernels_table.h"

namespace smp::runtime::meta {
namespace {

using at::Scalar;
using at::Tensor;

Tensor same(const Tensor& self) { return make_like(self); }

Tensor is_nan(const Tensor& self) { return make_like(self, at::kBool); }

Tensor hardtanh(const Tensor& self, const Scalar& /*min*/, const Scalar& /*max*/) { return make_like(self); }

Tensor prelu(const Tensor& self, const Tensor& weight) { return broadcast(self.scalar_type(), {&self, &weight}); }

std::tuple<Tensor, Tensor> log_sigmoid(const Tensor& self) {
  return {make(self.sizes(), self.scalar_type()), make(self.sizes(), self.scalar_type())};
}

Tensor& unary_out(const Tensor& self, Tensor& out) { return fit_out(out, {&self}); }

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  return broadcast(at::native::result_type(self, other), {&condition, &self, &other});
}

Tensor& where_out(const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out) {
  return fit_out(out, {&condition, &self, &other});
}

Tensor floor_divide(const Tensor& self, const Tensor& other) {
  Tensor out;
  return Tensor(at::TensorIterator::binary_op(out, self, other).output());
}

Tensor rsub(const Tensor& self, const Tensor& other, const Scalar& alpha) { return at::sub(other, self, alpha); }

Tensor remainder(const Scalar& self, const Tensor& other) {
  return at::remainder(at::native::wrapped_scalar_tensor(self), other);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double /*p*/, std::optional<bool> /*train*/) {
  return {make_like(input), make_like(input, at::kBool)};
}

}  // namespace

void add_elementwise(Table& table) {
  table.add("relu", &same);
  table.add("hardswish", &same);
  table.add("hardtanh", &hardtanh);
  table.add("_prelu_kernel", &prelu);
  table.add("log_sigmoid_forward", &log_sigmoid);
  table.add("isnan", &is_nan);
  table.add("abs.out", &unary_out);
  table.add("where.self", &where);
  table.add("where.self_out", &where_out);
  table.add("floor_divide", &floor_divide);
  table.add("rsub.Tensor", &rsub);
  table.add("remainder.Scalar_Tensor", &remainder);
  table.add("native_dropout", &native_dropout);
}

}  // namespace smp::runtime::meta
