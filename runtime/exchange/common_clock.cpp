// Questions and answers of eight bytes.
#include "runtime/exchange/common_clock.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/exchange/tags.h"

namespace smp::runtime {
namespace {

constexpr int kNumRoundTrips = 16;  // the first ones may wait for the other rank to come
constexpr const char* kDoing = "comparing clocks";

void send(Transport& ranks, int dest, int64_t number) { ranks.isend(dest, kClockTag, &number, sizeof number).wait(kDoing); }

int64_t receive(Transport& ranks, int source) {
  int64_t number = 0;
  ranks.irecv(source, kClockTag, &number, sizeof number).wait(kDoing);
  return number;
}

}  // namespace

int64_t clock_offset_ns(const std::vector<RoundTrip>& trips) {
  TORCH_INTERNAL_ASSERT(!trips.empty(), "clocks are compared by at least one round trip");
  int64_t least_ns = std::numeric_limits<int64_t>::min(), most_ns = std::numeric_limits<int64_t>::max();
  for (const RoundTrip& trip : trips) {
    least_ns = std::max(least_ns, trip.remote_ns - trip.answered_ns);
    most_ns = std::min(most_ns, trip.remote_ns - trip.asked_ns);
  }
  if (least_ns <= 0 && 0 <= most_ns) return 0;
  const auto shortest = std::min_element(trips.begin(), trips.end(), [](const RoundTrip& a, const RoundTrip& b) {
    return a.answered_ns - a.asked_ns < b.answered_ns - b.asked_ns;
  });
  return shortest->remote_ns - shortest->asked_ns - (shortest->answered_ns - shortest->asked_ns) / 2;
}

ClockReading measure_clock(Transport& ranks, const NanosecondClock& now) {
  if (ranks.rank() != 0) {
    for (int i = 0; i < kNumRoundTrips; ++i) {
      receive(ranks, 0);
      send(ranks, 0, now());
    }
    const int64_t offset_ns = receive(ranks, 0);
    return {now(), offset_ns};
  }
  std::vector<RoundTrip> trips(kNumRoundTrips);
  for (int rank = 1; rank < ranks.size(); ++rank) {
    for (RoundTrip& trip : trips) {
      trip.asked_ns = now();
      send(ranks, rank, trip.asked_ns);
      trip.remote_ns = receive(ranks, rank);
      trip.answered_ns = now();
    }
    send(ranks, rank, clock_offset_ns(trips));
  }
  return {now(), 0};
}

int64_t on_common_clock(int64_t own_ns, const ClockReading& first, const ClockReading& last) {
  const auto change = static_cast<double>(last.offset_ns - first.offset_ns);
  if (change == 0 || last.at_ns == first.at_ns) return own_ns - first.offset_ns;
  const double part = static_cast<double>(own_ns - first.at_ns) / static_cast<double>(last.at_ns - first.at_ns);
  return own_ns - first.offset_ns - std::llround(part * change);
}

}  // namespace smp::runtime
