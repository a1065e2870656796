// Slices and replay of recorded constructions.
#include "runtime/delayed/recording.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <unordered_set>

#include "runtime/capture/ghosts.h"
#include "runtime/capture/places.h"
#include "runtime/device/device.h"
#include "runtime/libtorch/boxed_tensors.h"
#include "runtime/libtorch/unmade.h"

namespace smp::runtime {

using partitioner::TensorSpec;

namespace {

c10::Storage allocate(int64_t num_bytes) {
  return at::empty({num_bytes}, at::TensorOptions(at::kByte).device(host().type)).storage();
}

/// Sets the state that an operator drew from; puts the default generator back.
class ReplayedGenerator {
 public:
  ReplayedGenerator(const DelayedRecording::Operation& operation, torch::jit::Stack& arguments) {
    if (!operation.generator_state.defined()) return;
    at::Generator generator = host().default_generator();
    if (operation.generator_argument >= 0) {
      generator = host().new_generator();
      arguments[static_cast<size_t>(operation.generator_argument)] = generator;
    }
    std::lock_guard<std::mutex> lock(generator.mutex());
    if (operation.generator_argument < 0) before_ = generator.get_state();
    generator.set_state(operation.generator_state);
  }
  ~ReplayedGenerator() {
    if (!before_.defined()) return;
    at::Generator generator = host().default_generator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(before_);
  }
  ReplayedGenerator(const ReplayedGenerator&) = delete;
  ReplayedGenerator& operator=(const ReplayedGenerator&) = delete;

 private:
  at::Tensor before_;
};

/// LibTorch keeps one default dtype per process; it is touched only where it has changed since.
class ReplayedDefaultDtype {
 public:
  explicit ReplayedDefaultDtype(at::ScalarType dtype) : before_(c10::get_default_dtype()) {
    const caffe2::TypeMeta wanted = c10::scalarTypeToTypeMeta(dtype);
    if (wanted != before_) c10::set_default_dtype(wanted);
  }
  ~ReplayedDefaultDtype() {
    if (c10::get_default_dtype() != before_) c10::set_default_dtype(before_);
  }
  ReplayedDefaultDtype(const ReplayedDefaultDtype&) = delete;
  ReplayedDefaultDtype& operator=(const ReplayedDefaultDtype&) = delete;

 private:
  caffe2::TypeMeta before_;
};

}  // namespace

int32_t DelayedRecording::new_storage(int64_t num_bytes) {
  num_bytes_.push_back(num_bytes);
  return static_cast<int32_t>(num_bytes_.size()) - 1;
}

void DelayedRecording::add(Operation operation) { operations_.push_back(std::move(operation)); }

/// The storages while some operators run.
class DelayedRecording::Run {
 public:
  Run(const DelayedRecording& recording, const std::vector<int32_t>& wanted)
      : recording_(recording), storages_(recording.num_bytes_.size()), wanted_(wanted.begin(), wanted.end()) {}

  void perform(const Operation& operation) {
    torch::jit::Stack stack = operation.arguments;
    for (const Use& use : operation.uses) {
      put_tensor(stack[use.argument], use.element, tensor_of(use.geometry, storage(use.storage)));
    }
    const std::vector<at::Tensor> inputs = flatten_outputs(stack);
    {
      const ReplayedDefaultDtype dtype(operation.default_dtype);
      const ReplayedGenerator generator(operation, stack);
      operation.op.callBoxed(stack);
    }
    const std::vector<at::Tensor> outputs = flatten_outputs(stack);
    TORCH_INTERNAL_ASSERT(outputs.size() == operation.made.size(), operation.op.operator_name());
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (operation.made[i].storage >= 0) keep(operation, operation.made[i], inputs, outputs[i]);
    }
  }

  void release(int32_t number) {
    if (!wanted_.contains(number)) storages_[static_cast<size_t>(number)] = {};
  }

  /// Memory that nothing was written to holds anything, as after empty().
  const c10::Storage& storage(int32_t number) {
    c10::Storage& own = storages_[static_cast<size_t>(number)];
    if (!own) own = allocate(recording_.num_bytes_[static_cast<size_t>(number)]);
    return own;
  }

 private:
  // The shape was predicted by a kernel for the meta device; where strides differ, or where the
  // operator gave an argument back, the prediction holds.
  void keep(const Operation& operation, const Made& made, const std::vector<at::Tensor>& inputs, const at::Tensor& output) {
    const TensorSpec real = spec_of(output);
    TORCH_CHECK(real.sizes == made.geometry.sizes && real.dtype == made.geometry.dtype, operation.op.operator_name(),
                ": expected sizes ", at::IntArrayRef(made.geometry.sizes), " and type ", made.geometry.dtype,
                " as when the module was constructed, got ", at::IntArrayRef(real.sizes), " and ", real.dtype, ".");
    c10::Storage& own = storages_[static_cast<size_t>(made.storage)];
    const auto bytes = static_cast<size_t>(recording_.num_bytes_[static_cast<size_t>(made.storage)]);
    const bool fits = same_geometry(output, made.geometry) && output.storage().nbytes() == bytes;
    const bool is_new = std::none_of(inputs.begin(), inputs.end(),
                                     [&](const at::Tensor& input) { return input.defined() && input.is_alias_of(output); });
    if (fits && is_new) {
      own = output.storage();
    } else {
      tensor_of(made.geometry, storage(made.storage)).copy_(output);
    }
  }

  const DelayedRecording& recording_;
  std::vector<c10::Storage> storages_;
  std::unordered_set<int32_t> wanted_;
};

std::vector<size_t> DelayedRecording::slice(const std::vector<int32_t>& storages) const {
  std::unordered_set<int32_t> needed(storages.begin(), storages.end());
  std::vector<size_t> found;
  for (size_t i = operations_.size(); i-- > 0;) {
    const Operation& operation = operations_[i];
    const bool writes = std::any_of(operation.uses.begin(), operation.uses.end(),
                                    [&](const Use& use) { return use.is_written && needed.contains(use.storage); });
    const bool makes = std::any_of(operation.made.begin(), operation.made.end(),
                                   [&](const Made& made) { return needed.contains(made.storage); });
    if (!writes && !makes) continue;
    found.push_back(i);
    for (const Use& use : operation.uses) {
      if (operation.overwrites && use.is_written) {
        needed.erase(use.storage);
      } else {
        needed.insert(use.storage);
      }
    }
  }
  std::reverse(found.begin(), found.end());
  return found;
}

std::vector<c10::Storage> DelayedRecording::compute(const std::vector<int32_t>& storages) const {
  const at::NoGradGuard no_grad;
  const std::vector<size_t> needed = slice(storages);
  std::map<int32_t, size_t> last_use;
  for (size_t i : needed) {
    for (const Use& use : operations_[i].uses) last_use[use.storage] = i;
    for (const Made& made : operations_[i].made) {
      if (made.storage >= 0) last_use[made.storage] = i;
    }
  }
  Run run(*this, storages);
  for (size_t i : needed) {
    const Operation& operation = operations_[i];
    run.perform(operation);
    for (const Use& use : operation.uses) {
      if (last_use.at(use.storage) == i) run.release(use.storage);
    }
    for (const Made& made : operation.made) {
      if (made.storage >= 0 && last_use.at(made.storage) == i) run.release(made.storage);
    }
  }
  std::vector<c10::Storage> made;
  for (int32_t number : storages) made.push_back(run.storage(number));
  return made;
}

}  // namespace smp::runtime
