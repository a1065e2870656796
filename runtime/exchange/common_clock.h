// One clock for all ranks: how far the clock of each is from that of rank 0.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

using NanosecondClock = std::function<int64_t()>;

/// One question of rank 0 and its answer: rank 0's clock when it asked and when it had the answer, the other's in between.
struct RoundTrip {
  int64_t asked_ns = 0;
  int64_t remote_ns = 0;
  int64_t answered_ns = 0;
};

/// The other clock minus rank 0's. Of several round trips the shortest counts, and of that the middle, so that the error is
/// at most half of it (Cristian, Probabilistic clock synchronization, Distributed Computing 1989; the filter of NTP, RFC
/// 5905, section 10). Where all of them allow 0, it is 0: the clocks are one and the same then, as on one host; clocks of
/// two hosts begin at different moments. Needs at least one.
int64_t clock_offset_ns(const std::vector<RoundTrip>& trips);

/// What one measurement says about this rank's clock.
struct ClockReading {
  int64_t at_ns = 0;  // of its own
  int64_t offset_ns = 0;
};

/// Collective: rank 0 asks the others in turn.
ClockReading measure_clock(Transport& ranks, const NanosecondClock& now);

/// A moment of this rank's clock on that of rank 0, by two measurements: clocks run at steady, but not at equal speed.
int64_t on_common_clock(int64_t own_ns, const ClockReading& first, const ClockReading& last);

}  // namespace smp::runtime
