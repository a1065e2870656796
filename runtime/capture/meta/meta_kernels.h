// Geometry without data: makes aten operators run on meta tensors in a process without Python.
// Owns what is registered at aten/Meta; knows nothing of graphs or recording.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace smp::runtime {

/// Registers, once per process, meta kernels for the aten operators that have a CPU kernel but
/// neither a meta nor a composite one (337 in LibTorch 2.11). Idempotent and thread-safe; takes
/// about 5 ms the first time. Registrations stay until the process ends and never replace an
/// existing Meta kernel, so a Python process, whose torch brings its own, is left as it is but for OverPythonsKernels.
///
/// Layer 1 is written by hand, for what large models are made of and for what zeros do not tell: constant time, no memory.
/// Layer 2 is one boxed kernel for all other operators: it runs the operator on the CPU, on zeros of the same geometry, and
/// returns tensors of the results' geometry. It needs the memory and time of one such call, freed at its end. Both lie below
/// autograd: results keep their grad_fn. The default generator is left untouched.
///
/// Operators whose result depends on values (item, equal, nonzero, masked_select, unique, ...)
/// throw c10::NotImplementedError that names the operator.
void register_meta_kernels();

/// In a Python process, while a recording is made: the meta kernels of a process without Python. Those of Python's torch
/// import 870 modules at the first call, run the interpreter at each, and give other sizes than the CPU (_embedding_bag)
/// or take fewer dtypes (_grouped_mm). Of the whole process, since a later registration lies over earlier ones; its end
/// brings those back.
class OverPythonsKernels {
 public:
  OverPythonsKernels();

 private:
  std::vector<c10::RegistrationHandleRAII> registrations_;
};

/// Where a composite looks at values that decide nothing about its results' geometry, while it runs on meta tensors:
/// answers aten::cov whether its weights and observations are fit, and gives packed RNNs, whose tensors are on the stack,
/// batch sizes that could be those of the call. For this thread, until the end of the scope.
class AssumedValues {
 public:
  AssumedValues(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  ~AssumedValues();
  AssumedValues(const AssumedValues&) = delete;
  AssumedValues& operator=(const AssumedValues&) = delete;

 private:
  int64_t outer_checks_;
  bool has_checks_;
};

/// Calls `op` on `stack` like op.callBoxed, for calls whose tensors are on meta. Differs for two composites that LibTorch
/// takes apart otherwise there than on the CPU, so that a following transpose + view behaves alike:
/// scaled_dot_product_attention (always matrix products with a contiguous result on meta; on the CPU mostly a fused kernel
/// whose result has the query's strides) and group_norm (loses channels_last on meta).
void call_on_meta(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace smp::runtime
