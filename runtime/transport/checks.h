// Owns the refusals that all transports share: mistakes of the caller, before anything is sent.
#pragma once

#include <cstdint>
#include <vector>

namespace smp::runtime {

/// Throws c10::ValueError unless 0 <= peer < size, 0 <= tag <= kMaxTag and num_bytes >= 0.
void check_message(const char* operation, int peer, int size, int tag, int64_t num_bytes);
/// Throws c10::ValueError unless 0 <= root < size and num_bytes >= 0.
void check_broadcast(int64_t num_bytes, int root, int size);
/// Throws c10::ValueError unless `ranks` are distinct ranks below `size` with `my_rank` among them.
/// Returns my_rank's index in it.
int check_group(const std::vector<int>& ranks, int my_rank, int size);

}  // namespace smp::runtime
