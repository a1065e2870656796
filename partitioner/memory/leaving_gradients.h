// Memory of gradients on their way to other replicas.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// Bytes that are held now, and the most that ever were.
class ByteMeter {
 public:
  explicit ByteMeter(int64_t bytes) : now_(bytes), peak_(bytes) {}
  void hold(int64_t bytes) { peak_ = std::max(peak_, now_ += bytes); }
  void drop(int64_t bytes) { now_ -= bytes; }
  void touch(int64_t bytes) { peak_ = std::max(peak_, now_ + bytes); }
  int64_t now() const { return now_; }
  int64_t peak() const { return peak_; }

 private:
  int64_t now_, peak_;
};

/// Gradients that travel together, from the last parameter on. (runtime/gradients/gradient_reducer.cpp)
struct GradientBucket {
  int64_t bytes = 0;
  int64_t flag_bytes = 0;  // one number for each, whether it is there
  int64_t largest = 0;
  std::set<ValueId> missing{};
  bool is_shared = false;  // lies in a block that is there anyway
  /// Itself, and what comes for it.
  int64_t under_way_bytes() const { return is_shared ? 0 : 2 * (bytes + flag_bytes); }
};

/// One bucket is under way at a time. When the next leaves, or the step ends, each gradient is
/// copied out of the sum into a new tensor.
struct LeavingGradients {
  std::vector<GradientBucket> buckets;
  size_t next = 0;
  int64_t under_way = 0;

  void note_final(ValueId id, ByteMeter& meter) {
    for (GradientBucket& bucket : buckets) bucket.missing.erase(id);
    while (next < buckets.size() && buckets[next].missing.empty()) leave(meter);
  }
  void leave(ByteMeter& meter) {
    arrive(meter);
    under_way = buckets[next++].under_way_bytes();
    meter.hold(under_way);
  }
  void arrive(ByteMeter& meter) {
    if (next > 0) meter.touch(buckets[next - 1].largest);
    meter.drop(std::exchange(under_way, 0));
  }
};

}  // namespace smp::partitioner
