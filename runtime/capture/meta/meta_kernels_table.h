// What the files of hand-written meta kernels share: the table they register into and ways to make a result.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <initializer_list>
#include <string>
#include <utility>

namespace smp::runtime::meta {

/// Whether `op` can run on meta tensors as LibTorch ships it: by a Meta kernel or by a composite.
bool has_meta_kernel(const c10::OperatorHandle& op);

/// Registers kernels at aten/Meta, except where a Meta kernel exists or this LibTorch lacks the operator.
class Table {
 public:
  explicit Table(torch::Library& library) : library_(library) {}

  /// `name` without "aten::", with its overload. Replaces a composite: its results must have the
  /// same geometry.
  template <typename Kernel>
  void add(const char* name, Kernel&& kernel) {
    if (wants(name)) library_.impl(name, std::forward<Kernel>(kernel));
  }

 private:
  static bool wants(const std::string& name);

  torch::Library& library_;
};

void add_elementwise(Table& table);
void add_reductions(Table& table);
void add_indexing(Table& table);
void add_norms(Table& table);
void add_convolutions_and_pools(Table& table);
void add_losses(Table& table);
void add_attention(Table& table);

/// Gives every aten operator that is still without a meta kernel the boxed one of layer 2 (meta_fallback.cpp).
void add_fallbacks(torch::Library& library);

/// A new meta tensor: contiguous, or in the given memory format.
at::Tensor make(at::IntArrayRef sizes, at::ScalarType dtype, at::MemoryFormat format = at::MemoryFormat::Contiguous);

/// A new meta tensor with the sizes of `tensor` and the strides that an elementwise operator would give it.
at::Tensor make_like(const at::Tensor& tensor, at::ScalarType dtype);
at::Tensor make_like(const at::Tensor& tensor);

/// Brings `out` to the broadcast size of `inputs` as an elementwise `out=` kernel does. Dtypes stay as they are.
at::Tensor& fit_out(at::Tensor& out, std::initializer_list<const at::Tensor*> inputs);

/// A new meta tensor of `dtype` with the broadcast size of `inputs` and TensorIterator's strides.
at::Tensor broadcast(at::ScalarType dtype, std::initializer_list<const at::Tensor*> inputs);

}  // namespace smp::runtime::meta
