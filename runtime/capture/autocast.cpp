// Autocast on tensors without data.
#include "runtime/capture/autocast.h"

#include <ATen/Context.h>

#include <functional>
#include <vector>

#include "runtime/capture/interceptor.h"
#include "runtime/capture/meta/meta_kernels.h"
#include "runtime/capture/places.h"

namespace smp::runtime {
namespace {

using Exchange = std::function<at::Tensor(const at::Tensor&)>;

void exchange_tensors(c10::IValue& value, const Exchange& exchange) {
  if (value.isTensor()) {
    value = exchange(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(exchange(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::optional(exchange(*tensor)) : std::nullopt);
    }
    value = list;
  }
}

/// One operator that autocast has a kernel for.
class CastCall : public Interceptor {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    exchange_arguments(op, stack, [this](const at::Tensor& tensor) { return face_of(tensor); });
    const InterceptWithin scope(*this);
    op.callBoxedForDispatchKey(c10::DispatchKey::AutocastCPU, stack);
  }

  // What the kernel calls: casts of its arguments, then the operator itself.
  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    exchange_arguments(op, stack, [this](const at::Tensor& tensor) { return behind(tensor); });
    const std::string& name = op.operator_name().name;
    if (name == "aten::to" || name == "aten::_to_copy") {
      op.callBoxed(stack);
      stack.back() = face_of(stack.back().toTensor());
    } else {
      call_on_meta(op, stack);
    }
  }

 private:
  struct Face {
    at::Tensor face, meta;
  };

  static void exchange_arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack, const Exchange& exchange) {
    for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
      exchange_tensors(stack[i], exchange);
    }
  }

  at::Tensor face_of(const at::Tensor& meta) {
    if (!meta.defined() || !meta.is_meta()) return meta;
    auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                         c10::DataPtr(nullptr, c10::Device(c10::kCPU)), nullptr,
                                                         /*resizable=*/false);
    auto face = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU), meta.dtype());
    face.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
    faces_.push_back({face, meta});
    return face;
  }

  at::Tensor behind(const at::Tensor& face) const {
    for (const Face& known : faces_) {
      if (known.face.is_same(face)) return known.meta;
    }
    return face;
  }

  std::vector<Face> faces_;
};

/// On the CPU aten::lstm is one oneDNN kernel, which autocast knows and whose results are all of its dtype; on meta it is
/// the sum of its parts. Not for weights with projections, nor with oneDNN switched off.
bool is_one_kernel(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const auto lstm = c10::Dispatcher::singleton().findSchemaOrThrow("aten::lstm", "input");
  if (!(op == lstm) || !at::globalContext().userEnabledMkldnn()) return false;
  const auto* call = &stack.end()[-9];  // input, hx, params, has_biases, num_layers, …
  const auto weights_per_layer = call[3].toBool() ? 4 : 2;
  const auto num_directions = call[7].toBool() ? 2 : 1;
  return call[0].toTensor().scalar_type() == at::kFloat &&
         static_cast<int64_t>(call[2].toListRef().size()) == weights_per_layer * num_directions * call[4].toInt();
}

/// Takes composites apart until autocast knows the operator, or nothing is left to take apart.
class Descent : public Interceptor {
 public:
  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const AssumedValues assumed(op, stack);
    if (op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) {
      CastCall().run(op, stack);
    } else if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      const bool casts_results = is_one_kernel(op, stack);
      {
        const InterceptWithin scope(*this);
        op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
      }
      for (size_t i = stack.size() - 3; casts_results && i < stack.size(); ++i) {
        stack[i] = stack[i].toTensor().to(current_autocast().dtype);
      }
    } else {
      call_on_meta(op, stack);
    }
  }
};

}  // namespace

void call_on_ghosts(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (!current_autocast().enabled) return call_on_meta(op, stack);
  Descent().operator_called(op, stack);
}

}  // namespace smp::runtime
