// Construction of ghosts and twins.
#include "runtime/capture/ghosts.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_set>

#include "runtime/capture/history.h"
#include "runtime/capture/interceptor.h"

namespace smp::runtime {
namespace {

using partitioner::TensorSpec;

// TensorImpl offers no setter for a single functionality key; a pointer to the protected member does.
struct KeySetAccess : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl& impl) { return impl.*(&KeySetAccess::key_set_); }
};

// StorageImpl can only switch the refusal of reads on. An explicit instantiation may name a private member, and so hands
// out the pointer that switches it off and on again.
template <bool c10::StorageImpl::*kMember>
struct StorageAccess {
  friend bool c10::StorageImpl::* throws_on_read() { return kMember; }
};
bool c10::StorageImpl::* throws_on_read();
template struct StorageAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

void refuse_raw_pointers(c10::StorageImpl& storage, const std::string& maker) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      "raw pointer to " + maker +
      ": expected operators only, got an access to the data of a tensor (data_ptr, accessor, storage). The tensors of a "
      "step body are ghosts: they have shapes but no data. Compute with operators, fill tensors by hand outside of the "
      "step, and bring what you want to look at to the CPU first: tensor.cpu().");
}

struct RefuseBackward : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { refuse_backward(); }
  std::string name() const override { return "smp::RefuseBackward"; }
};

}  // namespace

void refuse_backward() {
  TORCH_CHECK(false,
              "loss.backward() inside a step body: expected model.backward(loss), because the loss there is a ghost "
              "without data and its own backward would train nothing. Call backward on the DistributedModel.");
}

void refuse_engine(const std::string& place) {
  TORCH_CHECK(false, place, ": expected model.backward(loss) as the only backward, got loss.backward() inside a step body, or "
              "torch::autograd::grad, which would run on ghosts and give no gradients. Train with model.backward(loss) of the "
              "DistributedModel. What computes with gradients (a penalty) calls torch::autograd::grad within smp::opaque, on what "
              "that is given, or outside of the step.");
}

bool has_hooks(torch::autograd::Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

void refuse_hooks(torch::autograd::Node* root, const std::string& place) {
  std::unordered_set<torch::autograd::Node*> seen = {nullptr};
  std::vector<torch::autograd::Node*> open = {root};
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    if (!seen.insert(node).second) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(!has_hooks(*node), place,
                                ": expected gradient hooks on parameters only, got one on a tensor that the step body "
                                "made (register_hook, retain_grad). The body runs on ghosts and the backward on other "
                                "tensors, so the hook would never run and grad() stay undefined. Hook the parameter, or "
                                "change the gradient by operators: "
                                "x * s + (x - x * s).detach() scales it by s.");
    for (const auto& edge : node->next_edges()) open.push_back(edge.function.get());
  }
}

TensorSpec spec_of(const at::Tensor& tensor) {
  return {.sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .storage_offset = tensor.storage_offset(),
          .dtype = tensor.scalar_type(),
          .requires_grad = tensor.requires_grad()};
}

bool same_geometry(const at::Tensor& tensor, const TensorSpec& spec) {
  return tensor.sizes().equals(spec.sizes) && tensor.strides().equals(spec.strides) &&
         tensor.storage_offset() == spec.storage_offset && tensor.scalar_type() == spec.dtype;
}

void mark_as_ghost(const at::Tensor& tensor, const std::string& maker) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  auto& keys = KeySetAccess::of(impl);
  keys = keys.add(kCaptureKey);
  c10::StorageImpl& storage = *impl.unsafe_storage().unsafeGetStorageImpl();
  if (!storage.get_extra_meta().custom_data_ptr_error_msg_) refuse_raw_pointers(storage, maker);
}

void accept_raw_pointers(c10::StorageImpl& storage) {
  storage.*throws_on_read() = false;
  storage.get_extra_meta().custom_data_ptr_error_msg_.reset();
}

GhostAccess::~GhostAccess() {
  for (const c10::Storage& storage : storages_) storage.unsafeGetStorageImpl()->*throws_on_read() = true;
}

void GhostAccess::allow(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  bool& throws = storage.unsafeGetStorageImpl()->*throws_on_read();
  if (!throws) return;
  throws = false;
  storages_.push_back(storage);
}

c10::Storage make_ghost_storage(int64_t num_bytes, const std::string& maker) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(num_bytes),
      c10::DataPtr(nullptr, c10::Device(c10::kMeta)), c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  refuse_raw_pointers(*storage, maker);
  return c10::Storage(std::move(storage));
}

at::Tensor make_ghost(const TensorSpec& spec, const c10::Storage& storage, const NodeHandle& grad_fn) {
  auto ghost = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet({c10::DispatchKey::Meta, kCaptureKey}),
      c10::scalarTypeToTypeMeta(spec.dtype));
  c10::TensorImpl& impl = *ghost.unsafeGetTensorImpl();
  impl.set_sizes_and_strides(spec.sizes, spec.strides, spec.storage_offset);
  if (spec.requires_grad && grad_fn) torch::autograd::set_history(ghost, grad_fn);
  return ghost;
}

void set_geometry(const at::Tensor& ghost, const TensorSpec& spec) {
  ghost.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides, spec.storage_offset);
}

void set_gradient(const at::Tensor& ghost, bool requires_grad, const NodeHandle& grad_fn) {
  if (ghost.requires_grad() == requires_grad) return;
  ghost.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
  if (requires_grad) torch::autograd::set_history(ghost, grad_fn);
}

bool is_as_handed_out(const at::Tensor& ghost) {
  const torch::autograd::Node* node = history_of(ghost).own;
  return !is_trained(ghost) && (node == nullptr || typeid(*node) == typeid(RefuseBackward));
}

NodeHandle make_refuse_backward() { return make_node<RefuseBackward>(); }

at::Tensor make_twin(const at::Tensor& real) {
  if (real.is_meta()) return real;
  auto twin = at::empty_strided(real.sizes(), real.strides(), real.options().device(c10::kMeta));
  if (real.storage_offset() != 0) {
    twin.unsafeGetTensorImpl()->set_sizes_and_strides(real.sizes(), real.strides(), real.storage_offset());
  }
  if (real.is_leaf() && real.requires_grad()) twin.set_requires_grad(true);
  return twin;
}

}  // namespace smp::runtime
