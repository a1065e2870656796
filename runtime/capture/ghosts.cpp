// Construction of ghosts and twins.
#include "runtime/capture/ghosts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <utility>

#include "runtime/capture/history.h"
#include "runtime/device/device.h"
#include "runtime/libtorch/raw_pointers.h"

namespace smp::runtime {
namespace {

using partitioner::TensorSpec;

thread_local uint64_t running = 0;  // GhostRun::number of the body in progress

struct RefuseBackward : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { refuse_backward(); }
  std::string name() const override { return "smp::RefuseBackward"; }
};

c10::DispatchKey backend_of(const c10::Storage& storage) {
  return storage.device_type() == host().type ? host().backend : this_ranks_device().backend;
}

}  // namespace

void refuse_backward() {
  TORCH_CHECK(false,
              "loss.backward() inside a step body: expected model.backward(loss), because the loss there is a ghost without "
              "data and its own backward would train nothing. Call backward on the DistributedModel.");
}

void refuse_engine(const std::string& place) {
  TORCH_CHECK(false, place,
              ": expected model.backward(loss) as the only backward, got loss.backward() inside a step body, or "
              "torch::autograd::grad, which would run on ghosts and give no gradients. Train with model.backward(loss) of "
              "the DistributedModel. What computes with gradients (a penalty) calls torch::autograd::grad within "
              "smp::opaque, on what that is given, or outside of the step.");
}

void check_no_hooks(const GhostRun& run, const std::string& place) {
  torch::autograd::Node& node = *run.grad_fn;
  const bool has_hooks = !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() || !node.post_hooks().empty() ||
                         !node.retains_grad_hooks().empty();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !has_hooks, place,
      ": expected gradient hooks on parameters only, got one on a tensor that the step body made (register_hook, "
      "retain_grad). The body runs on ghosts and the backward on other tensors, so the hook would never run and grad() stay "
      "undefined. Hook the parameter, or change the gradient by operators: x * s + (x - x * s).detach() scales it by s.");
}

GhostRun begin_ghost_run() {
  static std::atomic<uint64_t> last = 0;
  running = ++last;
  return {.number = running, .grad_fn = make_refuse_backward()};
}

void end_ghost_run() { running = 0; }

const c10::Storage& Ghost::storage() const {
  TORCH_CHECK(
      run == running,
      "expected a tensor with data, got a ghost of a step body that has ended, or of another thread's body. Inside a step "
      "body tensors have shapes but no data; return what you need from the body and read it from the StepOutput.");
  return storage_;
}

Ghost::Ghost(c10::Storage&& storage, caffe2::TypeMeta dtype, uint64_t run_number, partitioner::ValueId value_id)
    : c10::TensorImpl(std::move(storage), c10::DispatchKeySet(backend_of(storage)), dtype),
      run(run_number),
      value(value_id) {}

c10::intrusive_ptr<c10::TensorImpl> Ghost::copy(const c10::VariableVersion& version, bool allow_metadata_change) const {
  auto copied = c10::make_intrusive<Ghost>(c10::Storage(storage_), data_type_, run, partitioner::kNoValue);
  copy_tensor_metadata(this, copied.get(), version, allow_metadata_change);
  if (stand_in.defined()) {
    copied->stand_in = at::Tensor(stand_in.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
  }
  return copied;
}

c10::intrusive_ptr<c10::TensorImpl> Ghost::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                   bool allow_metadata_change) const {
  return copy(version, allow_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> Ghost::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                   bool allow_metadata_change) const {
  return copy(version, allow_metadata_change);
}

c10::Storage make_ghost_storage(size_t num_bytes, const Device& device, const std::string& maker) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), num_bytes,
                                                       c10::DataPtr(nullptr, device.current()),
                                                       c10::GetAllocator(device.type), /*resizable=*/true);
  refuse_raw_pointers(
      *storage, "raw pointer to " + maker +
                    ": expected operators only, got an access to the data of a tensor (data_ptr, accessor, storage). The "
                    "tensors of a step body are ghosts: they have shapes but no data. Compute with operators, fill tensors "
                    "by hand outside of the step, and bring what you want to look at to the CPU first: tensor.cpu(). If an "
                    "operator says this: expected a tensor with data, got a ghost of a step body that has ended (or of "
                    "another thread's body); return what you need from the body and read it from the StepOutput.");
  return c10::Storage(std::move(storage));
}

at::Tensor make_ghost(const TensorSpec& spec, const c10::Storage& storage, const GhostRun& run, partitioner::ValueId value) {
  auto ghost =
      at::detail::make_tensor<Ghost>(c10::Storage(storage), c10::scalarTypeToTypeMeta(spec.dtype), run.number, value);
  ghost.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides, spec.storage_offset);
  if (spec.requires_grad) torch::autograd::impl::set_gradient_edge(ghost, torch::autograd::Edge(run.grad_fn, 0));
  return ghost;
}

void set_signs(const at::Tensor& ghost, LazySigns signs) {
  if (signs.conj) ghost._set_conj(true);
  if (signs.neg) ghost._set_neg(true);
}

void set_gradient(const at::Tensor& ghost, bool requires_grad, const GhostRun& run) {
  if (ghost.requires_grad() == requires_grad) return;
  ghost.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
  if (requires_grad) torch::autograd::impl::set_gradient_edge(ghost, torch::autograd::Edge(run.grad_fn, 0));
}

bool is_as_handed_out(const at::Tensor& ghost) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(ghost);
  if (meta == nullptr) return true;
  const torch::autograd::Node* node = meta->grad_fn_.get();
  return !meta->requires_grad_ && (node == nullptr || typeid(*node) == typeid(RefuseBackward));
}

void refuse_history(const at::Tensor& ghost, const std::string& place) {
  is_trained(ghost) ? refuse_trained(ghost, place) : refuse_custom_function(ghost, place);
}

NodeHandle make_refuse_backward() {
  auto node = make_node<RefuseBackward>();
  // Of a loss: Python looks at it before it runs the engine.
  node->add_input_metadata(at::empty({}, c10::TensorOptions(this_ranks_device().type)));
  return node;
}

at::Tensor make_twin(const at::Tensor& real) {
  auto twin = at::empty_strided(real.sizes(), real.strides(), real.options().device(c10::kMeta));
  if (real.storage_offset() != 0) {
    twin.unsafeGetTensorImpl()->set_sizes_and_strides(real.sizes(), real.strides(), real.storage_offset());
  }
  if (real.is_leaf() && real.requires_grad()) twin.set_requires_grad(true);
  return twin;
}

}  // namespace smp::runtime
