// Registration of the meta kernels, and the helpers that all of them use.
#include "runtime/capture/meta/meta_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "runtime/capture/meta/meta_kernels_table.h"
#include "runtime/libtorch/registered_kernels.h"

namespace smp::runtime {
namespace {

using Key = c10::DispatchKey;

bool is_python_process = false;

/// A function of the interpreter has no C++ function to call, all that LibTorch registers at Meta has one.
bool is_of_cpp(const c10::impl::AnnotatedKernel& registered) {
  return registered.kernel.isValidUnboxed() || registered.kernel.isValidSymUnboxed();
}

bool has_only_pythons_kernel(const c10::OperatorHandle& op) {
  const auto* kernels = registered_kernels(op, Key::Meta);
  return kernels != nullptr && std::none_of(kernels->begin(), kernels->end(), &is_of_cpp);
}

bool has_only_pythons_kernel(const std::string& name) {
  const auto op = meta::find_operator(name);
  return op.has_value() && has_only_pythons_kernel(*op);
}

struct Kernel {
  c10::OperatorName op;
  c10::KernelFunction function;
};

/// For each operator whose meta kernel is Python's, what a process without Python calls. Without those that have no kernel
/// on the CPU either.
std::vector<Kernel> find_covered_kernels() {
  std::vector<Kernel> covered;
  torch::Library library(torch::Library::IMPL, "aten", Key::Meta, __FILE__, __LINE__);
  meta::Table table(library, &has_only_pythons_kernel);
  meta::add_all(table);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op.has_value()) continue;
    const auto* kernels = registered_kernels(*op, Key::Meta);
    if (kernels == nullptr || std::all_of(kernels->begin(), kernels->end(), &is_of_cpp)) continue;
    const auto own = std::find_if(kernels->begin(), kernels->end(), &is_of_cpp);
    if (own != kernels->end()) {
      covered.push_back({name, own->kernel});
    } else if (const auto* composite = meta::find_composite(*op)) {
      covered.push_back({name, *composite});
    } else if (meta::add_fallback(library, *op)) {
      covered.push_back({name, kernels->front().kernel});
    }
  }
  return covered;
}

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
  // Never destroyed, like the library above.
  static const auto& covered = *new std::vector<Kernel>(find_covered_kernels());
  registrations_.reserve(covered.size());
  for (const auto& [op, function] : covered) {
    registrations_.push_back(c10::Dispatcher::singleton().registerImpl(op, Key::Meta, function, {}, nullptr, "smp"));
  }
}

namespace meta {

const c10::KernelFunction* find_composite(const c10::OperatorHandle& op) {
  for (const Key key :
       {Key::CompositeExplicitAutogradNonFunctional, Key::CompositeExplicitAutograd, Key::CompositeImplicitAutograd}) {
    if (const auto* kernels = registered_kernels(op, key)) return &kernels->front().kernel;
  }
  return nullptr;
}

bool has_meta_kernel(const c10::OperatorHandle& op) {
  // hasComputedKernelForDispatchKey(Meta) is true for every operator: core's backend fallback counts there.
  return op.hasKernelForDispatchKey(Key::Meta) || find_composite(op) != nullptr;
}

std::optional<c10::OperatorHandle> find_operator(const std::string& name) {
  const auto dot = name.find('.');
  const c10::OperatorName full{"aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
  return c10::Dispatcher::singleton().findSchema(full);
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
  const auto op = find_operator(name);
  return op.has_value() && !op->hasKernelForDispatchKey(Key::Meta);
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
