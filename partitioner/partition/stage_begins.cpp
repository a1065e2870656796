// Range addition, and search by two minima.
#include "partitioner/partition/stage_begins.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace smp::partitioner {

void StageBegins::reset(Aim aim, std::vector<Begin> begins) {
  aim_ = aim;
  begins_ = std::move(begins);
  width_ = static_cast<size_t>(std::ceil(std::sqrt(static_cast<double>(begins_.size()))));
  buckets_.assign((begins_.size() + width_ - 1) / width_, {});
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) update(bucket);
}

size_t StageBegins::end_of(size_t bucket) const { return std::min(begins_.size(), (bucket + 1) * width_); }

void StageBegins::update(size_t bucket) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Begin least{kInfinity, kInfinity};
  for (size_t i = bucket * width_; i < end_of(bucket); ++i) {
    least = {std::min(least.us, begins_[i].us), std::min(least.aim_us, begins_[i].aim_us)};
  }
  buckets_[bucket].least = least;
}

void StageBegins::add(size_t first, size_t end, double us) {
  for (size_t bucket = first / width_; first < end; ++bucket) {
    const size_t bucket_end = end_of(bucket), to = std::min(end, bucket_end);
    if (first == bucket * width_ && to == bucket_end) {
      buckets_[bucket].added_us += us;
    } else {
      for (size_t i = first; i < to; ++i) {
        begins_[i].us += us;
        if (aim_ == Aim::kTraffic) begins_[i].aim_us += us;
      }
      update(bucket);
    }
    first = to;
  }
}

double StageBegins::aim_of(const Begin& begin, double added_us, double extra_us) const {
  return aim_ == Aim::kTraffic ? begin.aim_us + added_us : std::max(begin.aim_us, begin.us + added_us + extra_us);
}

std::optional<StageBegins::Found> StageBegins::find(size_t first, size_t end, double extra_us, double limit_us) const {
  std::optional<Found> best;
  for (size_t bucket = first / width_; first < end; ++bucket) {
    const size_t to = std::min(end, end_of(bucket));
    const auto& [least, added_us] = buckets_[bucket];
    const auto improves = [&](const Begin& begin) {
      return begin.us + added_us + extra_us <= limit_us && (!best || aim_of(begin, added_us, extra_us) < best->aim_us);
    };
    if (improves(least)) {
      for (size_t i = first; i < to; ++i) {
        if (improves(begins_[i])) best = Found{i, aim_of(begins_[i], added_us, extra_us)};
      }
    }
    first = to;
  }
  return best;
}

}  // namespace smp::partitioner
