// Memories by storage.
#include "runtime/capture/memories.h"

namespace smp::runtime {

using namespace partitioner;

const Memories::Memory* Memories::find(const at::Tensor& tensor) const {
  const auto known = by_storage_.find(storage_of(tensor));
  return known == by_storage_.end() || known->second.storage.expired() || known->second.id < 0 ? nullptr : &known->second;
}

Memories::Memory& Memories::of(const at::Tensor& tensor) {
  const Memory unknown{.storage = tensor.storage().getWeakStorageImpl()};
  Memory& memory = by_storage_.try_emplace(storage_of(tensor), unknown).first->second;
  if (memory.storage.expired()) memory = unknown;
  return memory;
}

int32_t Memories::id_of(const at::Tensor& tensor, ValueId value) {
  Memory& memory = of(tensor);
  if (memory.id < 0) name(memory, new_id(), value);
  return memory.id;
}

// Numbers are those of values, so that a run which takes composites apart has the same ones.
void Memories::name(Memory& memory, int32_t id, ValueId first_value) {
  memory.id = id;
  memory.first_value = first_value;
  if (ghosts_.size() <= static_cast<size_t>(id)) ghosts_.resize(static_cast<size_t>(id) + 1);
  c10::Storage& ghosts = ghosts_[static_cast<size_t>(id)];
  if (!ghosts) ghosts = std::move(memory.ghosts);
  memory.ghosts = {};
  if (ghosts) {
    by_storage_.insert_or_assign(ghosts.unsafeGetStorageImpl(),
                                 Memory{ghosts.getWeakStorageImpl(), id, first_value, memory.first_tensor});
  }
}

void Memories::take_over(const std::vector<c10::Storage>& ghosts, int32_t num_ids) {
  num_ids_ = num_ids;
  ghosts_.assign(ghosts.begin(), ghosts.begin() + num_ids);
}

c10::Storage Memories::ghosts_of(const at::Tensor& stand_in) {
  Memory& memory = of(stand_in);
  if (memory.id >= 0 && ghosts_[static_cast<size_t>(memory.id)]) return ghosts_[static_cast<size_t>(memory.id)];
  const Device& device = memory.device != nullptr ? *memory.device : *device_;
  if (!memory.ghosts) memory.ghosts = make_ghost_storage(stand_in.storage().nbytes(), device, maker_);
  const c10::Storage own = memory.ghosts;
  if (memory.id >= 0) name(memory, memory.id, memory.first_value);
  return own;
}

}  // namespace smp::runtime
