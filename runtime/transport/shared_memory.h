// Owns memory that the ranks of one host share.
#pragma once

#include <boost/interprocess/mapped_region.hpp>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

/// A block of memory for each rank of a group, which every rank of it reads. Who may write where, and when, the users
/// settle by messages.
class SharedMemory {
 public:
  /// num_bytes: of each block, > 0. Collective. Null, on all ranks alike, where one of them cannot reach another's block:
  /// ranks of several hosts, or too little room where the system keeps shared memory (/dev/shm). The memory is there when
  /// it returns, and goes with the last process that has it, however that ends; a process that is killed in here leaves
  /// its own as /dev/shm/smp-*.
  static std::unique_ptr<SharedMemory> make(Transport& group, int64_t num_bytes);

  char* of(int rank) const { return static_cast<char*>(blocks_[static_cast<size_t>(rank)].get_address()); }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  SharedMemory() = default;

  std::vector<boost::interprocess::mapped_region> blocks_;  // by rank
  int64_t num_bytes_ = 0;
};

}  // namespace smp::runtime
