// Which storages are one memory: those of real tensors, of stand-ins and of ghosts. Owns the numbers that memories have.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/capture/ghosts.h"

namespace smp::runtime {

class Memories {
 public:
  /// What is known of one storage.
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int32_t id = -1;  // Value::storage; -1: of no value yet
    partitioner::ValueId first_value = partitioner::kNoValue;
    at::Tensor first_tensor{};       // its stand-in, where it is kept
    c10::Storage ghosts{};           // while there is no id
    const Device* device = nullptr;  // where memory is that the body brings along
  };

  /// `ghosts`: Recording::storages, which it fills.
  explicit Memories(std::vector<c10::Storage>& ghosts) : ghosts_(ghosts) {}

  /// Null for memory that the recording has not met.
  const Memory* find(const at::Tensor& tensor) const;
  Memory& of(const at::Tensor& tensor);
  void name(Memory& memory, int32_t id, partitioner::ValueId first_value);
  /// Numbers it for `value`, unless an earlier value has.
  int32_t id_of(const at::Tensor& tensor, partitioner::ValueId value);
  /// For what lies on no storage yet.
  int32_t new_id() { return num_ids_++; }
  int32_t num_ids() const { return num_ids_; }
  /// The memories of another recording that has as many.
  void take_over(const std::vector<c10::Storage>& ghosts, int32_t num_ids);

  /// That of the ghosts for `stand_in`. Where it is new it is on the device, and named in texts, as set last.
  c10::Storage ghosts_of(const at::Tensor& stand_in);
  void set_maker(std::string maker) { maker_ = std::move(maker); }
  void set_device(const Device& device) { device_ = &device; }
  const std::string& maker() const { return maker_; }

 private:
  std::vector<c10::Storage>& ghosts_;
  std::unordered_map<const c10::StorageImpl*, Memory> by_storage_;
  int32_t num_ids_ = 0;
  std::string maker_;
  const Device* device_ = &this_ranks_device();
};

}  // namespace smp::runtime
