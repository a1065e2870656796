// Ghosts: tensors with geometry but no data that stand for values while a step body is recorded or matched.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <string>
#include <typeinfo>

#include "partitioner/graph/graph.h"
#include "runtime/device/device.h"
#include "runtime/libtorch/node_handle.h"
#include "runtime/libtorch/tensor_spec.h"

namespace smp::runtime {

/// What the ghosts of one run of a body have in common.
struct GhostRun {
  uint64_t number = 0;   // no other run of the process has it
  NodeHandle grad_fn{};  // of all that require a gradient: running it means that loss.backward() was called on one
};

/// On this thread, in place of the one before.
GhostRun begin_ghost_run();
void end_ghost_run();

/// A tensor that has the device, keys and geometry of a real one of this rank, so that a body takes the same branches, on a
/// storage that refuses raw access. Copies that LibTorch makes of it behind the dispatcher (tensor.data(), make_variable)
/// are ghosts of the same run, without a value.
class Ghost final : public c10::TensorImpl {
 public:
  Ghost(c10::Storage&& storage, caffe2::TypeMeta dtype, uint64_t run_number, partitioner::ValueId value_id);

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                              bool allow_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                              bool allow_metadata_change) const override;
  /// Throws outside of the body: no operator is intercepted there, and LibTorch would make an ordinary tensor on the
  /// storage, as view() does, that a later run could not tell from one of its own.
  const c10::Storage& storage() const override;

  const uint64_t run;          // GhostRun::number
  partitioner::ValueId value;  // in the recording: the last one while it is recorded, the first one in a matched run
  at::Tensor stand_in;         // while it is recorded: the meta tensor on which operators run

 private:
  c10::intrusive_ptr<c10::TensorImpl> copy(const c10::VariableVersion& version, bool allow_metadata_change) const;
};

/// Null unless `tensor` is a ghost; of any run.
inline Ghost* as_ghost(const at::Tensor& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(Ghost) ? static_cast<Ghost*>(&impl) : nullptr;
}

/// A ghost that its body may drop: LibTorch goes on with a tensor that nobody else holds, and copies others.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

inline WeakTensor weak(const at::Tensor& tensor) { return WeakTensor(tensor.getIntrusivePtr()); }
/// Undefined once it is gone.
inline at::Tensor lock(const WeakTensor& tensor) { return at::Tensor(tensor.lock()); }

/// A storage for ghosts that say they are on `device`; a raw pointer to its data throws a text that names `maker`.
c10::Storage make_ghost_storage(size_t num_bytes, const Device& device, const std::string& maker);

at::Tensor make_ghost(const partitioner::TensorSpec& spec, const c10::Storage& storage, const GhostRun& run,
                      partitioner::ValueId value);

/// Of a tensor whose numbers are to be read with another sign: a lazy conj(), or imag() of one.
struct LazySigns {
  bool conj = false, neg = false;
};

inline LazySigns signs_of(const at::Tensor& tensor) { return {tensor.is_conj(), tensor.is_neg()}; }
void set_signs(const at::Tensor& ghost, LazySigns signs);

/// Lets a ghost require a gradient, with the run's function, or none.
void set_gradient(const at::Tensor& ghost, bool requires_grad, const GhostRun& run);

/// Whether autograd knows of a ghost what it was handed out with, or less: no custom function, no requires_grad_().
bool is_as_handed_out(const at::Tensor& ghost);
/// The text for a ghost of which it knows more. `place` begins it.
[[noreturn]] void refuse_history(const at::Tensor& ghost, const std::string& place);

/// Throws when a hook stands on a ghost of the run. `place` begins the text.
void check_no_hooks(const GhostRun& run, const std::string& place);

/// A function that refuses loss.backward() inside a step body, as a tensor's grad_fn.
NodeHandle make_refuse_backward();
/// The text for loss.backward() inside a step body.
[[noreturn]] void refuse_backward();
/// The text for torch::autograd::grad and backward inside a step body.
[[noreturn]] void refuse_engine(const std::string& place);

/// A meta tensor that stands for a real one while operators run on ghosts; parameters keep requires_grad.
at::Tensor make_twin(const at::Tensor& real);

}  // namespace smp::runtime
