// Ghosts: tensors with geometry but no data that stand for values while a step body is recorded or matched.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/libtorch/node_handle.h"

namespace smp::runtime {

/// Geometry of a real or meta tensor.
partitioner::TensorSpec spec_of(const at::Tensor& tensor);

/// Same sizes, strides, offset and dtype.
bool same_geometry(const at::Tensor& tensor, const partitioner::TensorSpec& spec);

/// Equal for tensors that share memory; ghosts too, which do not tell where their data is.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// Marks a tensor as a ghost: every operator on it reaches the capture handler, on any thread, at any time, and
/// a raw pointer to its data (data_ptr, accessor, storage) throws a text that names `maker`.
void mark_as_ghost(const at::Tensor& tensor, const std::string& maker);

/// A meta storage for ghosts; a raw pointer to its data throws a text that names `maker`.
c10::Storage make_ghost_storage(int64_t num_bytes, const std::string& maker);

/// Undoes the refusal of raw pointers, of a storage that is given data next.
void accept_raw_pointers(c10::StorageImpl& storage);

/// While an operator runs on ghosts LibTorch may take their addresses (null), to see whether arguments overlap.
class GhostAccess {
 public:
  GhostAccess() = default;
  ~GhostAccess();
  GhostAccess(const GhostAccess&) = delete;
  GhostAccess& operator=(const GhostAccess&) = delete;
  void allow(const at::Tensor& tensor);

 private:
  std::vector<c10::Storage> storages_;
};

/// A ghost of this geometry on `storage`. `grad_fn` (may be null) is attached when the spec requires a gradient.
at::Tensor make_ghost(const partitioner::TensorSpec& spec, const c10::Storage& storage,
                      const NodeHandle& grad_fn);

void set_geometry(const at::Tensor& ghost, const partitioner::TensorSpec& spec);
/// Lets a ghost require a gradient, with this function, or none.
void set_gradient(const at::Tensor& ghost, bool requires_grad, const NodeHandle& grad_fn);

/// Whether autograd knows of a ghost what it was handed out with, or less.
bool is_as_handed_out(const at::Tensor& ghost);

/// The autograd node behind every ghost of a matched body: running it means loss.backward() was called on a ghost.
NodeHandle make_refuse_backward();

bool has_hooks(torch::autograd::Node& node);
/// Throws when a hook stands on a node that a backward from `root` (may be null) reaches. `place` begins the text.
void refuse_hooks(torch::autograd::Node* root, const std::string& place);

/// The text for loss.backward() inside a step body.
[[noreturn]] void refuse_backward();
/// The text for torch::autograd::grad and backward inside a step body.
[[noreturn]] void refuse_engine(const std::string& place);

/// A meta tensor that stands for a real one while operators run on ghosts; parameters keep requires_grad.
at::Tensor make_twin(const at::Tensor& real);

}  // namespace smp::runtime
