// Layer 2 of the meta kernels: one boxed kernel that runs any operator on the CPU, on zeros of its
// arguments' geometry, and returns tensors of the results' geometry. Complete rather than fast;
// layer 1 has what is frequent or large.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eye.h>
#include <c10/util/irange.h>

#include <string_view>
#include <vector>

#include "runtime/capture/meta/meta_kernels_table.h"
#include "runtime/device/device.h"
#include "runtime/libtorch/boxed_tensors.h"

namespace smp::runtime::meta {
namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;

/// Operators that check values and would reject zeros.
bool needs_ones(const OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  return name == "aten::_assert_async" || name == "aten::_functional_assert_async" || name == "aten::multinomial" ||
         name == "aten::floor_divide";
}

/// Operators that need a positive definite or invertible matrix.
bool needs_identity(const OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  return name == "aten::cholesky" || name == "aten::cholesky_inverse" || name == "aten::_cholesky_solve_helper";
}

/// Runs one call on CPU twins of its meta tensors and finds the meta tensors of the results.
class Probe {
 public:
  explicit Probe(const OperatorHandle& op) : op_(op) {}

  IValue to_cpu(IValue value);
  IValue to_meta(IValue value);
  /// Gives written meta arguments the geometry that the operator gave their twins (out= resizes).
  void copy_written_geometry() const;

 private:
  struct Twin {
    Tensor meta, cpu;
  };

  Tensor twin_of(const Tensor& meta);
  Tensor fresh_twin(const Tensor& meta) const;
  Tensor result_of(const Tensor& cpu);
  Tensor meta_of_storage(const Tensor& cpu) const;

  const OperatorHandle& op_;
  std::vector<Twin> twins_;
};

Tensor Probe::fresh_twin(const Tensor& meta) const {
  Tensor cpu = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(host().type));
  if (needs_identity(op_) && meta.dim() >= 2) return cpu.copy_(at::eye(meta.size(-2), meta.size(-1), cpu.options()));
  return needs_ones(op_) ? cpu.fill_(1) : cpu.zero_();
}

Tensor Probe::twin_of(const Tensor& meta) {
  if (!meta.is_meta()) return meta;
  for (const Twin& twin : twins_) {
    if (twin.meta.is_same(meta)) return twin.cpu;
  }
  twins_.push_back({meta, fresh_twin(meta)});
  return twins_.back().cpu;
}

IValue Probe::to_cpu(IValue value) {
  if (value.isDevice()) return at::Device(host().type);
  map_tensors(value, [this](const Tensor& meta) { return twin_of(meta); });
  return value;
}

Tensor Probe::result_of(const Tensor& cpu) {
  for (const Twin& twin : twins_) {
    if (twin.cpu.is_same(cpu)) return twin.meta;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(cpu.layout() == at::kStrided && !cpu.is_quantized(), op_.operator_name(),
                              ": expected a dense result, got ", cpu.toString(),
                              "; sparse and quantized tensors cannot be captured");
  const Tensor base = meta_of_storage(cpu);
  twins_.push_back({at::as_strided(base, cpu.sizes(), cpu.strides(), base.storage_offset() + cpu.storage_offset()), cpu});
  return twins_.back().meta;
}

/// A tensor on the storage that stands for the storage of `cpu`: an argument's, an earlier result's
/// or a new one. Its offset is that of the first element of the CPU's storage.
Tensor Probe::meta_of_storage(const Tensor& cpu) const {
  for (const Twin& twin : twins_) {
    if (!twin.cpu.storage().is_alias_of(cpu.storage())) continue;
    TORCH_INTERNAL_ASSERT(twin.cpu.scalar_type() == cpu.scalar_type(), op_.operator_name(),
                          " returns another dtype on the same storage");
    return at::as_strided(twin.meta, {0}, {1}, twin.meta.storage_offset() - twin.cpu.storage_offset());
  }
  return make({static_cast<int64_t>(cpu.storage().nbytes() / cpu.element_size())}, cpu.scalar_type());
}

IValue Probe::to_meta(IValue value) {
  map_tensors(value, [this](const Tensor& cpu) { return result_of(cpu); });
  return value;
}

void Probe::copy_written_geometry() const {
  for (const Twin& twin : twins_) {
    if (twin.cpu.sizes() == twin.meta.sizes() && twin.cpu.strides() == twin.meta.strides()) continue;
    at::native::resize_output(twin.meta, twin.cpu.sizes());
    twin.meta.unsafeGetTensorImpl()->set_sizes_and_strides(twin.cpu.sizes(), twin.cpu.strides());
  }
}

/// A random operator draws from a copy, so that the program's own random numbers stay as they are.
IValue private_generator(const IValue& value) {
  if (value.isNone()) return host().new_generator();
  return value.toGenerator().clone();
}

bool is_generator(const c10::Argument& argument) {
  const auto& type = *argument.type();
  const auto* optional = type.castRaw<c10::OptionalType>();
  return (optional != nullptr ? *optional->getElementType() : type).kind() == c10::TypeKind::GeneratorType;
}

void run_on_zeros(const OperatorHandle& op, torch::jit::Stack* stack) {
  // Operators without a derivative formula arrive with autograd still on.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Probe probe(op);
  const auto& arguments = op.schema().arguments();
  auto arguments_on_stack = torch::jit::last(*stack, arguments.size());
  torch::jit::Stack cpu_stack;
  for (const auto i : c10::irange(arguments.size())) {
    cpu_stack.push_back(is_generator(arguments[i]) ? private_generator(arguments_on_stack[i])
                                                   : probe.to_cpu(arguments_on_stack[i]));
  }
  try {
    op.callBoxed(cpu_stack);
  } catch (c10::Error& error) {
    error.add_context(
        c10::str("while the sizes of the result of ", op.operator_name(), " were found by running it on zeros on the CPU"));
    throw;
  }
  probe.copy_written_geometry();
  torch::jit::drop(*stack, arguments.size());
  for (IValue& value : cpu_stack) stack->push_back(probe.to_meta(std::move(value)));
}

bool returns_only_tensors(const OperatorHandle& op) {
  for (const c10::Argument& result : op.schema().returns()) {
    const auto text = result.type()->str();
    if (text != "Tensor" && text != "Tensor[]") return false;
  }
  return true;
}

void refuse(const OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name(), ": the value of a tensor was read while its model is being captured; expected operators ",
      returns_only_tensors(op) ? "whose results have" : "that return tensors, with",
      " the same sizes for all data, because a capture knows sizes but no values. Compute with tensors (a mask and "
      "torch::where in place of a branch, masked_select or nonzero), read the value outside of the model, or call code "
      "whose results have the same sizes for all data through smp::opaque");
}

torch::CppFunction fallback_for(const OperatorHandle& op) {
  const bool depends_on_values =
      !returns_only_tensors(op) || op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  return depends_on_values ? torch::CppFunction::makeFromBoxedFunction<&refuse>()
                           : torch::CppFunction::makeFromBoxedFunction<&run_on_zeros>();
}

}  // namespace

void add_fallbacks(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (op.has_value() && !has_meta_kernel(*op)) add_fallback(library, *op);
  }
}

bool add_fallback(torch::Library& library, const c10::OperatorHandle& op) {
  if (!op.hasKernelForDispatchKey(host().backend)) return false;
  library.impl(c10::toString(op.operator_name()).c_str(), fallback_for(op));
  return true;
}

}  // namespace smp::runtime::meta
