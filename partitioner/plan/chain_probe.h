// One question to a chain of blocks: is there a split in which no stage is slower than T? The
// parametric search that asks it, and the error texts, are in contiguous.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "partitioner/plan/contiguous.h"

namespace smp::partitioner {

/// A chain whose operators are merged between allowed cuts, so that every block border may be cut.
/// Prefix sums over blocks; entry p belongs to the border before block p, 0 <= p <= num_blocks().
struct BlockChain {
  std::vector<double> prefix_us;   // time of the blocks before p
  std::vector<double> receive_us;  // of a stage that begins at p
  std::vector<double> send_us;     // of a stage that ends at p
  std::vector<double> traffic_us;  // receive + send
  std::vector<int64_t> prefix_fixed_bytes;
  std::vector<int64_t> prefix_activation_bytes;
  std::vector<int> first_stage, last_stage;  // per block; empty without pins
  std::vector<Chain::StageLimits> stages;

  int num_blocks() const { return static_cast<int>(prefix_us.size()) - 1; }
  /// The one arithmetic in which stages are compared; rounding is monotone, so minima commute with
  /// it.
  double begin_us(int stage, int border) const {
    return receive_us[border] - prefix_us[border] * stages[stage].slowness;
  }
  double end_us(int stage, int border) const {
    return prefix_us[border] * stages[stage].slowness + send_us[border];
  }
  double stage_us(int stage, int begin, int end) const {
    return end_us(stage, end) + begin_us(stage, begin);
  }
};

/// Borders that a stage may begin at when it ends at a border which only moves right: memory and
/// pins both push the earliest begin to the right, which makes it a sliding window.
class BeginWindow {
 public:
  BeginWindow(const BlockChain& chain, int stage, int first_begin);
  /// The earliest border at which a stage ending at `end` may begin; may be `end` itself (none).
  int earliest_begin(int end);

 private:
  bool fits(int end) const;

  const BlockChain& chain_;
  const Chain::StageLimits limits_;
  int stage_;
  int begin_;
  int pins_seen_;  // blocks before this one are checked against the stage
};

/// Decides "every one of exactly `num_stages` non-empty stages costs at most T".
///
/// Stage after stage it computes all borders that can be reached; the cheapest predecessor of a
/// border is a sliding-window minimum, so a stage costs O(borders). Borders from which the rest
/// cannot be done in time are skipped, which leaves narrow bands when T is near the optimum.
class ChainProbe {
 public:
  ChainProbe(const BlockChain& chain, int num_stages);

  /// True if there is such a split; then `cuts` and `slowest_us` describe one of them.
  bool reaches(double limit_us);

  /// After a failure: no limit below this succeeds either. Greater than the limit that failed.
  double next_candidate_us() const { return next_candidate_us_; }
  const std::vector<int>& cuts() const { return cuts_; }  // num_stages + 1 borders
  double slowest_us() const { return slowest_us_; }

  /// Of all splits within `limit_us` (there must be one) the one with the least traffic, then the
  /// earliest cuts, last cut first. O(borders log borders) per stage.
  std::vector<int> least_traffic(double limit_us);

 private:
  void find_earliest_borders(double limit_us);
  bool sweep(int stage, double limit_us);
  void backtrack();
  int latest_border(int stage_count) const;

  const BlockChain& chain_;
  int num_stages_;
  double next_candidate_us_ = 0;
  double slowest_us_ = 0;
  std::vector<int>
      earliest_;  // by number of finished stages: later stages fit in time from here on only
  std::vector<int> border_;    // reached borders, all stages one after another
  std::vector<int> parent_;    // index into border_
  std::vector<size_t> begin_;  // where in border_ the borders after s stages begin
  std::vector<int> window_;    // indices into border_, begin_us increasing
  std::vector<int> cuts_;
};

/// The largest number of non-empty stages <= K that some split has, times and traffic ignored; 0 if
/// none.
int largest_feasible_stage_count(const BlockChain& chain);

}  // namespace smp::partitioner
