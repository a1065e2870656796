// What a message takes beside its tensor, and how many wait: numbers that the runtime obeys and the
// prediction of memory counts.
#pragma once

#include <cstdint>

namespace smp::partitioner {

/// Receives of one edge and direction that a rank posts before it needs their messages.
inline constexpr int64_t kReceivesAhead = 2;

/// Bytes that a message is longer than the tensor in it, at most: header and alignment.
inline constexpr int64_t kMessageOverheadBytes = 320;

}  // namespace smp::partitioner
