// Ownership, synchronisation and release of parameters.
#include "runtime/placement/placement.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <memory>
#include <set>
#include <string>

#include "runtime/device/device.h"
#include "runtime/device/random.h"
#include "runtime/exchange/tags.h"
#include "runtime/exchange/wire.h"
#include "runtime/libtorch/raw_pointers.h"
#include "runtime/libtorch/tensor_spec.h"
#include "runtime/libtorch/unmade.h"
#include "runtime/transport/abandoned.h"

namespace smp::runtime {

using namespace partitioner;

TensorHomes homes_of(const Graph& graph, const Plan& plan, const Bindings& bindings) {
  std::map<std::string, std::set<int>> readers;
  for (const StagePlan& stage : plan.stages) {
    for (ValueId id : stage.parameters) readers[graph.values[id].name].insert(stage.rank);
  }
  std::map<const NamedTensor*, std::set<int>> ranks;  // by the first tensor on each storage
  for (const NamedTensor& named : bindings.tensors()) {
    ranks[&bindings.first_on_storage(named)].merge(readers[named.name]);
  }
  TensorHomes homes;
  for (const NamedTensor& named : bindings.tensors()) {
    const auto& held = ranks[&bindings.first_on_storage(named)];
    homes[named.name] = held.empty() ? std::vector<int>{0} : std::vector<int>(held.begin(), held.end());
  }
  return homes;
}

namespace {

void copy_to_tied(const NamedTensor& named, const TensorHome& home, Transport& pipeline) {
  const std::vector<int>& ranks = home.whole_on();
  if (pipeline.rank() == home.owner()) {
    WireWriter out;
    out.put(named.tensor);
    const std::string bytes = out.take();
    for (size_t i = 1; i < ranks.size(); ++i) pipeline.send_bytes(ranks[i], kTiedTag, bytes);
  } else if (home.is_on(pipeline.rank())) {
    const std::string bytes = pipeline.receive_bytes(home.owner(), kTiedTag);
    at::Tensor tensor = named.tensor;
    tensor.copy_(read_tensor(bytes, "values of '" + named.name + "'"));
  }
}

}  // namespace

void make_local_values(const TensorHomes& homes, const Bindings& bindings, int pipeline_rank) {
  std::vector<at::Tensor> local;
  for (const NamedTensor& named : bindings.tensors()) {
    if (homes.at(named.name).is_on(pipeline_rank)) local.push_back(named.tensor);
  }
  const GeneratorHold hold;
  make_values(local);
}

void broadcast_tensors(const std::vector<at::Tensor>& tensors, Transport& group, int source) {
  if (group.size() == 1) return;
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor data = tensor.detach().contiguous().to(host().type);
    keeping(std::make_shared<at::Tensor>(data), [&] { group.broadcast(memory_of(data), source); });
    if (!data.is_alias_of(tensor)) tensor.copy_(data);
  }
}

void synchronise(const TensorHomes& homes, const Bindings& bindings, Transport& pipeline, Transport& replicas) {
  const at::NoGradGuard no_grad;
  for (const NamedTensor& named : bindings.tensors()) {
    const TensorHome& home = homes.at(named.name);
    if (home.is_tied()) copy_to_tied(named, home, pipeline);
  }
  std::vector<at::Tensor> held;
  for (const NamedTensor& named : bindings.tensors()) {
    if (homes.at(named.name).is_on(pipeline.rank())) held.push_back(named.tensor);
  }
  broadcast_tensors(held, replicas, 0);
}

namespace {

c10::Storage copied_to(const Device& device, const c10::Storage& storage) {
  const auto num_bytes = static_cast<int64_t>(storage.nbytes());
  c10::DataPtr memory = device.allocate(num_bytes);
  device.copy(memory.get(), data_of(storage), num_bytes);
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(memory),
                                               c10::GetAllocator(device.type), /*resizable=*/true);
}

// Of a tensor whose data are elsewhere.
c10::Storage faced_as(const Device& device, const c10::Storage& storage) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                               c10::DataPtr(nullptr, device.current()), c10::GetAllocator(device.type),
                                               /*resizable=*/true);
}

}  // namespace

bool move_to_device(const Bindings& bindings, const std::function<bool(const NamedTensor&)>& is_here) {
  const Device& device = this_ranks_device();
  const c10::InferenceMode no_inference(false);  // a first step that evaluates would leave parameters that cannot be trained
  std::map<const c10::StorageImpl*, c10::Storage> moved;
  std::vector<c10::Storage> left;  // alive, so that no new one has the address of an old one
  for (const NamedTensor& named : bindings.tensors()) {
    at::Tensor tensor = named.tensor;
    if (device.type == host().type || is_on_this_ranks_device(tensor)) continue;
    const bool stays_unmade = is_here(named) && is_unmade(tensor);
    if (stays_unmade) continue;
    const c10::Storage& storage = tensor.storage();
    const auto [found, is_first] = moved.try_emplace(storage.unsafeGetStorageImpl());
    if (is_first) {
      found->second = is_here(named) ? copied_to(device, storage) : faced_as(device, storage);
      left.push_back(storage);
    }
    tensor.set_data(tensor_of(spec_of(tensor), found->second));
    if (tensor.is_leaf() && tensor.grad().defined()) tensor.mutable_grad() = tensor.grad().to(device.current());
  }
  return !moved.empty();
}

void release_others(const TensorHomes& homes, const Bindings& bindings, int pipeline_rank) {
  std::set<const c10::StorageImpl*> kept;
  for (const NamedTensor& named : bindings.tensors()) {
    if (homes.at(named.name).is_on(pipeline_rank)) kept.insert(named.tensor.storage().unsafeGetStorageImpl());
  }
  for (const NamedTensor& named : bindings.tensors()) {
    c10::StorageImpl* storage = named.tensor.storage().unsafeGetStorageImpl();
    if (kept.contains(storage)) continue;
    storage->set_data_ptr(c10::DataPtr(nullptr, storage->device()));
    refuse_raw_pointers(
        *storage, "the data of '" + named.name + "' live on pipeline rank " + std::to_string(homes.at(named.name).owner()) +
                      ", this is rank " + std::to_string(pipeline_rank) +
                      ". Use DistributedModel::state_dict() to gather them, or local_parameters() for those that are here.");
    at::Tensor tensor = named.tensor;
    if (tensor.is_leaf()) tensor.mutable_grad().reset();
  }
}

}  // namespace smp::runtime
