// What the files of hand-written meta kernels share: the table they register into and ways to make a result.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

namespace smp::runtime::meta {

/// Whether `op` can run on meta tensors as LibTorch ships it: by a Meta kernel or by a composite.
bool has_meta_kernel(const c10::OperatorHandle& op);

/// The kernel of `op` that LibTorch composes of other operators, for every device; null: none.
const c10::KernelFunction* find_composite(const c10::OperatorHandle& op);

/// By its name without "aten::" ("add.Tensor").
std::optional<c10::OperatorHandle> find_operator(const std::string& name);

/// Whether there is an operator of this name, and nothing registered for it at Meta.
bool lacks_meta_kernel(const std::string& name);

/// Registers kernels at aten/Meta, those whose names it wants.
class Table {
 public:
  Table(torch::Library& library, bool (*wants)(const std::string& name)) : library_(library), wants_(wants) {}

  /// `name` without "aten::", with its overload. Replaces a composite: its results must have the
  /// same geometry.
  template <typename Kernel>
  void add(const char* name, Kernel&& kernel) {
    if (wants_(name)) library_.impl(name, std::forward<Kernel>(kernel));
  }

 private:
  torch::Library& library_;
  bool (*wants_)(const std::string& name);
};

void add_elementwise(Table& table);
void add_reductions(Table& table);
void add_indexing(Table& table);
void add_norms(Table& table);
void add_convolutions_and_pools(Table& table);
void add_losses(Table& table);
void add_attention(Table& table);
void add_all(Table& table);

/// Gives every aten operator that is still without a meta kernel the boxed one of layer 2 (meta_fallback.cpp).
void add_fallbacks(torch::Library& library);
/// Gives it to this operator; false: it has no kernel on the CPU.
bool add_fallback(torch::Library& library, const c10::OperatorHandle& op);

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
