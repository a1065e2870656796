// The ghosts of a recording: which meta tensor stands for each, and on which storage it lies.
#include "runtime/capture/recorder.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage(const c10::Storage& storage) { return storage.getWeakStorageImpl(); }

}  // namespace

/// Null for memory that the recording has not met.
const Recorder::StorageInfo* Recorder::find_storage(const at::Tensor& tensor) const {
  const auto known = storages_.find(storage_of(tensor));
  return known == storages_.end() || known->second.storage.expired() || known->second.id < 0 ? nullptr : &known->second;
}

Recorder::StorageInfo& Recorder::storage_info(const at::Tensor& tensor) {
  const StorageInfo unknown{weak_storage(tensor.storage()), -1, kNoValue, {}};
  StorageInfo& info = storages_.try_emplace(storage_of(tensor), unknown).first->second;
  if (info.storage.expired()) info = unknown;
  return info;
}

int32_t Recorder::storage_id(const at::Tensor& stand_in, ValueId value) {
  StorageInfo& info = storage_info(stand_in);
  if (info.id < 0) name_storage(info, num_storages_++, value);
  return info.id;
}

// Numbers are those of values, so that a run which takes composites apart has the same ones.
void Recorder::name_storage(StorageInfo& storage, int32_t id, ValueId first_value) {
  storage.id = id;
  storage.first_value = first_value;
  auto& all = recording_->storages;
  if (all.size() <= static_cast<size_t>(id)) all.resize(static_cast<size_t>(id) + 1);
  c10::Storage& ghosts = all[static_cast<size_t>(id)];
  if (!ghosts) ghosts = std::move(storage.ghosts);
  storage.ghosts = {};
  if (ghosts) {
    storages_.insert_or_assign(ghosts.unsafeGetStorageImpl(),
                               StorageInfo{weak_storage(ghosts), id, first_value, storage.first_tensor});
  }
}

c10::Storage Recorder::ghost_storage(const at::Tensor& stand_in) {
  StorageInfo& info = storage_info(stand_in);
  if (info.id >= 0 && recording_->storages[static_cast<size_t>(info.id)]) {
    return recording_->storages[static_cast<size_t>(info.id)];
  }
  const Device& device = info.device != nullptr ? *info.device : *makes_on_;
  if (!info.ghosts) info.ghosts = make_ghost_storage(stand_in.storage().nbytes(), device, maker_);
  const c10::Storage own = info.ghosts;
  if (info.id >= 0) name_storage(info, info.id, info.first_value);
  return own;
}

at::Tensor Recorder::ghost_of(const at::Tensor& stand_in) {
  at::Tensor ghost = make_ghost(spec_of(stand_in), ghost_storage(stand_in), run_, kNoValue);
  as_ghost(ghost)->stand_in = stand_in;
  set_signs(ghost, signs_of(stand_in));
  return ghost;
}

// Other real tensors than those of the body's operators are made within a composite.
at::Tensor Recorder::stand_in_of(const at::Tensor& tensor) const {
  if (const Ghost* ghost = as_ghost(tensor)) return ghost->stand_in;
  const auto known = identities_.find(tensor.unsafeGetTensorImpl());
  if (known != identities_.end()) return known->second.stand_in;
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : make_twin(tensor);
}

}  // namespace smp::runtime
