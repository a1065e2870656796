// Registration of the meta kernels, and the helpers that all of them use.
#include "runtime/capture/meta/meta_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>

#include <memory>
#include <mutex>

#include "runtime/capture/meta/meta_kernels_table.h"

namespace smp::runtime {
namespace {

bool is_python_process = false;

}  // namespace

void register_meta_kernels() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: at exit the dispatcher may be gone before any static of ours.
    static auto* const library =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
    is_python_process = !meta::lacks_meta_kernel("_embedding_bag");  // C++ has none
    meta::Table table(*library, &meta::lacks_meta_kernel);
    meta::add_all(table);
    meta::add_fallbacks(*library);
  });
}

OverPythonsKernels::OverPythonsKernels() {
  register_meta_kernels();
  if (!is_python_process) return;
  library_ = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
  meta::Table table(*library_, [](const std::string& name) { return name == "_embedding_bag"; });
  meta::add_losses(table);
  meta::add_fallback(*library_, "aten::_grouped_mm");
}

OverPythonsKernels::~OverPythonsKernels() = default;

namespace meta {

bool has_meta_kernel(const c10::OperatorHandle& op) {
  // hasComputedKernelForDispatchKey(Meta) is true for every operator: core's backend fallback counts there.
  using Key = c10::DispatchKey;
  for (const Key key : {Key::Meta, Key::CompositeExplicitAutograd, Key::CompositeImplicitAutograd,
                        Key::CompositeExplicitAutogradNonFunctional}) {
    if (op.hasKernelForDispatchKey(key)) return true;
  }
  return false;
}

void add_all(Table& table) {
  add_elementwise(table);
  add_reductions(table);
  add_indexing(table);
  add_norms(table);
  add_convolutions_and_pools(table);
  add_losses(table);
  add_attention(table);
}

bool lacks_meta_kernel(const std::string& name) {
  const auto dot = name.find('.');
  const c10::OperatorName full{"aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
  const auto op = c10::Dispatcher::singleton().findSchema(full);
  return op.has_value() && !op->hasKernelForDispatchKey(c10::DispatchKey::Meta);
}

at::Tensor make(at::IntArrayRef sizes, at::ScalarType dtype, at::MemoryFormat format) {
  return at::Tensor(at::detail::empty_meta(sizes, dtype, format));
}

at::Tensor make_like(const at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.is_non_overlapping_and_dense()) {
    return at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), dtype));
  }
  const auto strides = at::infer_dense_strides(tensor.sizes(), tensor.strides());
  return at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), strides, dtype));
}

at::Tensor make_like(const at::Tensor& tensor) { return make_like(tensor, tensor.scalar_type()); }

at::Tensor& fit_out(at::Tensor& out, std::initializer_list<const at::Tensor*> inputs) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).allow_cpu_scalars(true).add_output(out);
  for (const at::Tensor* input : inputs) config.add_const_input(*input);
  config.build();
  return out;
}

at::Tensor broadcast(at::ScalarType dtype, std::initializer_list<const at::Tensor*> inputs) {
  at::Tensor out = make({0}, dtype);
  return fit_out(out, inputs);
}

}  // namespace meta
}  // namespace smp::runtime
