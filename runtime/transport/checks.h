// Owns the refusals that all transports share: mistakes of the caller, before anything is sent.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/device/memory.h"

namespace smp::runtime {

class Transport;

/// A list of ranks in an error text: "{0, 2}".
std::string text_of(const std::vector<int>& ranks);
/// Throws c10::ValueError unless it is memory of the host.
void check_host_memory(const char* operation, const DeviceMemory& memory);
/// Throws c10::ValueError unless it is memory of the host or of this rank's device.
void check_ranks_memory(const char* operation, const DeviceMemory& memory);
/// Throws c10::ValueError unless 0 <= peer < size, 0 <= tag <= kMaxTag and 0 <= num_bytes.
void check_message(const char* operation, int peer, int size, int tag, int64_t num_bytes);
/// The number of elements of `terms`. Throws c10::TypeError for other types than Float, Double, Long, BFloat16 and Half,
/// c10::ValueError for a negative number and for memory of a device that is not this rank's, or that `group` does not move.
int64_t check_sum(const Transport& group, const DeviceMemory& terms, c10::ScalarType type);
/// Throws c10::ValueError unless `ranks` are distinct ranks below `size` with `my_rank` among them.
/// Returns my_rank's index in it.
int check_group(const std::vector<int>& ranks, int my_rank, int size);

}  // namespace smp::runtime
