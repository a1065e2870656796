// The begins that a stage may have, with what it costs from each: square-root decomposition.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace smp::partitioner {

/// What is least in the split that a probe looks for.
enum class Aim { kSlowestStage, kTraffic };

/// Begins 0, 1, ..., each with a cost and with the aim of the split that begins there, in buckets of about as many begins as
/// there are buckets. Sums are exact as long as all numbers are multiples of one grain (chain_probe.h).
class StageBegins {
 public:
  struct Begin {
    double us = 0;
    double aim_us = 0;  // the slowest stage before the begin, or the traffic of all
  };
  struct Found {
    size_t index = 0;
    double aim_us = 0;
  };

  void reset(Aim aim, std::vector<Begin> begins);

  /// Adds to the cost, and so to the traffic, of the begins [first, end).
  void add(size_t first, size_t end, double us);

  /// Of the begins [first, end) that cost at most `limit_us`, `extra_us` included, the one with the least aim, then the
  /// first.
  std::optional<Found> find(size_t first, size_t end, double extra_us, double limit_us) const;

 private:
  struct Bucket {
    Begin least;          // of each number on its own, `added_us` left out
    double added_us = 0;  // to all begins of the bucket
  };

  size_t end_of(size_t bucket) const;
  void update(size_t bucket);
  double aim_of(const Begin& begin, double added_us, double extra_us) const;

  Aim aim_ = Aim::kTraffic;
  size_t width_ = 1;
  std::vector<Begin> begins_;
  std::vector<Bucket> buckets_;
};

}  // namespace smp::partitioner
