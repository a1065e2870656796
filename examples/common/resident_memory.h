// Resident memory of this process, as the kernel counts it.
#pragma once

#include <cstdint>

namespace examples {

/// Bytes that are in memory now.
int64_t resident_bytes();

/// Most bytes that were in memory at once since the process started or forget_resident_peak() was called.
int64_t peak_resident_bytes();

/// The peak starts again from what is resident now. Without effect where the kernel forbids it.
void forget_resident_peak();

}  // namespace examples
