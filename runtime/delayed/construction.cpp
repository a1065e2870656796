// One operator call of a constructor at a time.
#include "runtime/delayed/construction.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>

#include "partitioner/graph/operator_traits.h"
#include "runtime/capture/arguments.h"
#include "runtime/capture/constants.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/meta/meta_kernels.h"
#include "runtime/capture/operator_info.h"
#include "runtime/delayed/draw.h"
#include "runtime/device/device.h"
#include "runtime/libtorch/boxed_tensors.h"
#include "runtime/libtorch/unmade.h"

namespace smp::runtime {

using partitioner::TensorSpec;
using partitioner::Trait;
using Use = DelayedRecording::Use;

namespace {

size_t first_argument(const OperatorInfo& info, const torch::jit::Stack& stack) {
  return stack.size() - static_cast<size_t>(info.num_arguments);
}

/// Calls `visit` for each defined tensor among the arguments, with the position and the place in a list (-1: in none).
void for_each_argument_tensor(const OperatorInfo& info, const torch::jit::Stack& stack,
                              const std::function<void(size_t, int, const at::Tensor&)>& visit) {
  const size_t first = first_argument(info, stack);
  for (size_t i = first; i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](int element, const at::Tensor& tensor) { visit(i - first, element, tensor); });
  }
}

/// What the handler looks at before it decides.
struct Arguments {
  Arguments(const OperatorInfo& info, const torch::jit::Stack& stack) {
    for_each_argument_tensor(info, stack, [&](size_t position, int, const at::Tensor& tensor) {
      ++num_tensors;
      num_unmade += is_unmade(tensor);
      if (info.argument_written[position]) (is_unmade(tensor) ? writes_unmade : writes_real) = true;
    });
    const size_t first = first_argument(info, stack);
    for (size_t i = first; i < stack.size(); ++i) {
      if (stack[i].isDevice()) device = stack[i].toDevice();
    }
  }
  int num_tensors = 0, num_unmade = 0;
  bool writes_real = false, writes_unmade = false;
  std::optional<c10::Device> device;
};

bool is_filled_by_pointer(const OperatorInfo& info, const Arguments& arguments, const torch::jit::Stack& stack) {
  return info.name == "aten::empty" && info.overload == "memory_format" && arguments.device &&
         stack[first_argument(info, stack)].isIntList() && stack[first_argument(info, stack)].toIntVector().size() == 1;
}

void call_with_values(const c10::OperatorHandle& op, const OperatorInfo& info, torch::jit::Stack& stack) {
  const torch::jit::Stack before = stack;
  const size_t first = first_argument(info, stack);
  for_each_argument_tensor(info, before, [&](size_t position, int element, const at::Tensor& tensor) {
    if (is_unmade(tensor)) put_tensor(stack[first + position], element, value_of(tensor));
  });
  op.callBoxed(stack);
}

bool replaces_memory(const OperatorInfo& info) {
  return info.name == "aten::set_" && (info.overload == "source_Tensor" || info.overload == "source_Storage");
}

// set_(source): LibTorch's own asks where the memory is that the tensor had.
void replace_memory(const OperatorInfo& info, torch::jit::Stack& stack) {
  const size_t first = first_argument(info, stack);
  const at::Tensor self = stack[first].toTensor();
  const c10::IValue source = stack[first + 1];
  TensorSpec geometry{.strides = {1}, .dtype = self.scalar_type()};
  c10::Storage storage;
  if (source.isTensor()) {
    geometry = spec_of(source.toTensor());
    storage = source.toTensor().storage();
  } else {
    storage = source.toStorage();
    geometry.sizes = {static_cast<int64_t>(storage.nbytes() / self.itemsize())};
  }
  TORCH_CHECK_TYPE(geometry.dtype == self.scalar_type(), info.name, ": expected a source of type ", self.scalar_type(),
                   ", got ", geometry.dtype, ". Convert it before: source.to(tensor.dtype()).");
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(std::move(storage));
  impl.set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.storage_offset);
  impl.bump_version();
  stack.erase(stack.end() - info.num_arguments, stack.end());
  stack.emplace_back(self);
}

void check_supported(const OperatorInfo& info, OperatorClass kind, const Arguments& arguments) {
  const char* fix = " Make this part of the module outside of the scope, or from a std::vector by torch::tensor().";
  // Of others nobody knows whether they draw random numbers.
  TORCH_CHECK_NOT_IMPLEMENTED(
      info.name.starts_with("aten::"), info.name,
      ": expected operators of LibTorch under smp::DelayParamInitialization, got one of another library.", fix);
  TORCH_CHECK_NOT_IMPLEMENTED(!arguments.writes_real || !arguments.writes_unmade, info.name,
                              ": expected all results that are written to to be of the smp::DelayParamInitialization scope, "
                              "got one that has values.",
                              fix);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !at::autocast::is_autocast_enabled(host().type), info.name, ": expected construction without ",
      "autocast under smp::DelayParamInitialization, got autocast enabled. Construct outside of it.");
  TORCH_CHECK_NOT_IMPLEMENTED(kind != OperatorClass::kDataDependentShape, info.name, ": expected operators whose sizes ",
                              "do not depend on values under smp::DelayParamInitialization, got one whose do.", fix);
  TORCH_CHECK_NOT_IMPLEMENTED(
      kind != OperatorClass::kReplacesData && kind != OperatorClass::kRunsBackward && !info.changes_geometry_in_place,
      info.name, ": expected operators that make or fill tensors under smp::DelayParamInitialization, got one ",
      "that replaces the memory of a tensor, resizes it or differentiates.", fix);
}

/// One call, made on meta twins of its arguments.
class CallOnTwins {
 public:
  CallOnTwins(const c10::OperatorHandle& op, const OperatorInfo& info, torch::jit::Stack& stack,
              std::shared_ptr<DelayedRecording> own)
      : info_(info), stack_(stack), first_(first_argument(info, stack)), recording_(std::move(own)), operation_{.op = op} {
    originals_.assign(stack.begin() + static_cast<ptrdiff_t>(first_), stack.end());
    operation_.arguments = originals_;
    operation_.default_dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
    take_twins();
  }

  void run(bool is_factory) {
    note_generator();
    for (size_t i = 0; i < info_.argument_is_device.size(); ++i) {
      c10::IValue& argument = stack_[first_ + i];
      if (info_.argument_is_device[i] && (argument.isDevice() || is_factory)) argument = c10::Device(c10::kMeta);
    }
    try {
      const at::NoGradGuard no_grad;
      operation_.op.callBoxed(stack_);
    } catch (c10::Error& error) {
      error.add_context("while recording the construction of a module under smp::DelayParamInitialization (" + info_.name +
                        ")");
      throw;
    }
    check_written_geometry();
    hand_out();
    if (info_.is_random) advance(is_factory);
    if (changes_) recording_->add(std::move(operation_));
  }

 private:
  struct Twin {
    int32_t storage;
    c10::Storage original, meta;
  };

  // All tensors of one storage get twins on one storage.
  void take_twins() {
    const torch::jit::Stack before = stack_;
    for_each_argument_tensor(info_, before, [&](size_t position, int element, const at::Tensor& tensor) {
      at::Tensor twin;
      if (const Origin* origin = origin_of(tensor)) {
        take_recording(*origin);
        const TensorSpec geometry = spec_of(tensor);
        twin = tensor_of(geometry, meta_of(origin->storage, tensor.storage()));
        operation_.uses.push_back({position, element, origin->storage, geometry, info_.argument_written[position]});
        put_tensor(operation_.arguments[position], element, at::Tensor());
      } else if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        twin = tensor;  // moving it to meta would change type promotion
      } else {
        TORCH_CHECK_NOT_IMPLEMENTED(can_be_constant(tensor), info_.name, ": expected plain CPU tensors under ",
                                    "smp::DelayParamInitialization, got ", tensor.toString(), ".");
        twin = make_twin(tensor);
        put_tensor(operation_.arguments[position], element, snapshot_of(tensor));
      }
      seen_.push_back({twin, tensor});
      put_tensor(stack_[first_ + position], element, twin);
    });
    operation_.overwrites = overwrites();
  }

  void take_recording(const Origin& origin) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        operation_.uses.empty() || recording_ == origin.source, info_.name, ": expected the ",
        "tensors of one smp::DelayParamInitialization scope, got those of two. Make all of them in one.");
    recording_ = std::dynamic_pointer_cast<DelayedRecording>(origin.source);
    TORCH_INTERNAL_ASSERT(recording_ != nullptr);
  }

  const c10::Storage& meta_of(int32_t number, const c10::Storage& original) {
    for (const Twin& twin : twins_) {
      if (twin.storage == number) return twin.meta;
    }
    c10::Storage meta(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), original.nbytes(),
                                                            c10::DataPtr(nullptr, c10::Device(c10::kMeta)),
                                                            c10::GetAllocator(c10::kMeta),
                                                            /*resizable=*/true));
    twins_.push_back({number, original, std::move(meta)});
    return twins_.back().meta;
  }

  bool overwrites() const {
    if (!has(Trait::kOverwritesSelf, info_.name) || operation_.uses.size() != 1 || !operation_.uses[0].is_written)
      return false;
    const at::Tensor& self = seen_.front().second;
    return self.is_non_overlapping_and_dense() && self.nbytes() == self.storage().nbytes();
  }

  void note_generator() {
    if (!info_.is_random) return;
    generator_ = host().default_generator();
    for (size_t i = 0; i < originals_.size(); ++i) {
      if (!originals_[i].isGenerator()) continue;
      generator_ = originals_[i].toGenerator();
      operation_.generator_argument = static_cast<int>(i);
      operation_.arguments[i] = c10::IValue();
    }
    TORCH_CHECK_NOT_IMPLEMENTED(generator_.device().type() == host().type, info_.name,
                                ": expected a CPU generator, got one of ", generator_.device(), ".");
    std::lock_guard<std::mutex> lock(generator_.mutex());
    operation_.generator_state = generator_.get_state();
  }

  void check_written_geometry() const {
    for (const Use& use : operation_.uses) {
      if (!use.is_written) continue;
      const auto seen = std::find_if(seen_.begin(), seen_.end(), [&](const auto& pair) {
        const Origin* origin = origin_of(pair.second);
        return origin != nullptr && origin->storage == use.storage;
      });
      TORCH_CHECK_NOT_IMPLEMENTED(same_geometry(seen->first, spec_of(seen->second)), info_.name, ": expected a tensor of ",
                                  "sizes ", seen->first.sizes(),
                                  " to write to under smp::DelayParamInitialization, got one of ", seen->second.sizes(),
                                  ". Operators cannot resize their results there.");
    }
  }

  // Puts tensors for the caller in place of what the twins gave.
  void hand_out() {
    for (const Use& use : operation_.uses) changes_ = changes_ || use.is_written;
    const size_t num_returns = info_.returned_argument.size();
    const size_t first = stack_.size() - num_returns;
    for (size_t i = 0; i < num_returns; ++i) {
      c10::IValue& result = stack_[first + i];
      if (result.isTensor()) {
        result = handed(result.toTensor());
      } else if (result.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : result.toTensorVector()) list.push_back(handed(tensor));
        result = std::move(list);
      }
    }
  }

  at::Tensor handed(const at::Tensor& live) {
    DelayedRecording::Made& made = operation_.made.emplace_back();
    if (!live.defined()) return live;
    for (const auto& [twin, original] : seen_) {
      if (twin.is_same(live)) return original;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(live.has_storage(), info_.name, ": expected dense tensors under ",
                                "smp::DelayParamInitialization, got ", live.toString(), ". Make it outside of the scope.");
    TORCH_CHECK_NOT_IMPLEMENTED(
        !live.is_conj() && !live.is_neg(), info_.name, ": expected tensors without a lazy sign under ",
        "smp::DelayParamInitialization, got one with. Use conj_physical(), or make it outside of it.");
    const TensorSpec geometry = spec_of(live);
    for (const Twin& twin : twins_) {
      if (twin.meta.is_alias_of(live.storage())) return tensor_of(geometry, twin.original);
    }
    changes_ = true;
    made = {recording_->new_storage(static_cast<int64_t>(live.storage().nbytes())), geometry};
    c10::Storage storage =
        make_unmade_storage({recording_, made.storage}, static_cast<int64_t>(live.storage().nbytes()), info_.name);
    twins_.push_back({made.storage, storage, live.storage()});
    return tensor_of(geometry, storage);
  }

  void advance(bool is_factory) {
    const at::NoGradGuard no_grad;
    torch::jit::Stack arguments = originals_;
    if (draws_by_geometry(operation_.op, !is_factory)) {
      const size_t first = stack_.size() - info_.returned_argument.size();
      const bool gives_tensor = info_.returned_argument.size() == 1 && stack_[first].isTensor();
      if (gives_tensor && draw_in_parts(operation_.op, spec_of(stack_[first].toTensor()), generator_)) return;
      for_each_argument_tensor(info_, originals_, [&](size_t position, int element, const at::Tensor& tensor) {
        put_tensor(arguments[position], element,
                   at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false)));
      });
      operation_.op.callBoxed(arguments);
    } else {
      call_with_values(operation_.op, info_, arguments);
    }
  }

  const OperatorInfo& info_;
  torch::jit::Stack& stack_;
  size_t first_;
  std::shared_ptr<DelayedRecording> recording_;
  DelayedRecording::Operation operation_;
  torch::jit::Stack originals_;
  std::vector<std::pair<at::Tensor, at::Tensor>> seen_;  // twins and what they stand for
  std::vector<Twin> twins_;
  at::Generator generator_;
  bool changes_ = false;  // a storage, so that it must be recorded
};

}  // namespace

Construction::Construction(Literals literals) : literals_(literals), recording_(std::make_shared<DelayedRecording>()) {
  register_meta_kernels();
}

void Construction::operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OperatorInfo& info = operator_info(op);
  const Arguments arguments(info, stack);
  const bool is_factory = arguments.num_tensors == 0;
  const bool is_elsewhere = arguments.device && arguments.device->type() != host().type;
  const bool is_literal = literals_ == Literals::kThroughPointers && is_filled_by_pointer(info, arguments, stack);
  if (is_factory ? is_elsewhere || info.kind != OperatorClass::kRecorded || is_literal : arguments.num_unmade == 0) {
    return op.callBoxed(stack);
  }
  if (replaces_memory(info)) return replace_memory(info, stack);
  const bool is_on_handles =
      has(Trait::kOnHandle, info.name) || info.kind == OperatorClass::kGeometryQuery ||
      (info.changes_geometry_in_place && !info.makes_uninitialised && info.name != "aten::resize_as_");
  if (is_on_handles) return op.callBoxed(stack);
  const bool reads = info.kind == OperatorClass::kReadsValue || info.kind == OperatorClass::kAnsweredByIdentity;
  if (reads || (arguments.writes_real && !arguments.writes_unmade)) {
    const at::NoGradGuard no_grad;
    return call_with_values(op, info, stack);
  }
  check_supported(info, class_of_call(info, stack), arguments);
  CallOnTwins(op, info, stack, recording_).run(is_factory);
}

namespace {
thread_local int open_scopes = 0;
}

ConstructionScope::ConstructionScope(Literals literals)
    : construction_(literals), scope_(construction_, InterceptScope::Place::kBelowAll) {
  ++open_scopes;
}
ConstructionScope::~ConstructionScope() { --open_scopes; }
bool ConstructionScope::is_open() { return open_scopes > 0; }

}  // namespace smp::runtime
