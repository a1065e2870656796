// One question to a chain of blocks: is there a split in which no stage is slower than T? The
// parametric search that asks it, and the error texts, are in contiguous.cpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "partitioner/partition/begin_tree.h"
#include "partitioner/partition/chain.h"
#include "partitioner/partition/chain_messages.h"

namespace smp::partitioner {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A chain whose operators are merged between allowed cuts, so that every block border may be cut.
/// Prefix sums over blocks; entry p belongs to the border before block p, 0 <= p <= num_blocks().
///
/// All times are multiples of `grain_us`, a power of two so small that no sum of them is rounded:
/// what a message adds to a cost and takes away again leaves nothing behind.
struct BlockChain {
  double grain_us = 1;
  std::vector<double> prefix_us;  // time of the blocks before p
  std::vector<int64_t> prefix_fixed_bytes;
  std::vector<int64_t> prefix_activation_bytes;
  std::vector<int> first_stage, last_stage;  // per block; empty without pins
  std::vector<Chain::StageLimits> stages;
  ChainMessages messages;

  int num_blocks() const { return static_cast<int>(prefix_us.size()) - 1; }
  /// Of the operators that take `us` at full speed; rises with `us`.
  double work_us(int stage, double us) const { return std::rint(us * stages[stage].slowness / grain_us) * grain_us; }
  double work_until_us(int stage, int border) const { return work_us(stage, prefix_us[border]); }
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
/// Stage after stage it computes all borders that can be reached. While the end of a stage moves
/// right, a tree keeps what it costs from every reached begin: a block, and a message, change the
/// costs of a range of begins. So a stage takes O(messages log borders). Borders from which the
/// rest cannot be done in time are skipped, which leaves narrow bands when T is near the optimum.
class ChainProbe {
 public:
  ChainProbe(const BlockChain& chain, int num_stages);

  /// True if there is such a split; then `cuts` and `slowest_us` describe the one with the fewest
  /// microseconds of messages, then the earliest cuts, last cut first.
  bool reaches(double limit_us);

  /// After a failure: no limit below this succeeds either. Greater than the limit that failed.
  double next_candidate_us() const { return next_candidate_us_; }
  const std::vector<int>& cuts() const { return cuts_; }  // num_stages + 1 borders
  double slowest_us() const { return slowest_us_; }

 private:
  /// A border that a stage can end at.
  struct Reached {
    int border = 0;
    size_t parent = 0;      // where in reached_ the stage begins
    double us = 0;          // of the stage
    double traffic_us = 0;  // messages of all stages so far
  };

  void find_earliest_borders(double limit_us);
  bool sweep(int stage, double limit_us);
  void take_in(int block, size_t from, size_t from_end);
  void backtrack();
  int latest_border(int stage_count) const;

  const BlockChain& chain_;
  int num_stages_;
  double next_candidate_us_ = 0;
  double slowest_us_ = 0;
  std::vector<int> earliest_;     // by number of finished stages: later stages fit in time from here on only
  std::vector<Reached> reached_;  // all stages one after another
  size_t stage_begin_ = 0;        // where in it the begins of the stage to be swept are
  BeginTree begins_;              // of that stage
  std::vector<BeginTree::Begin> leaves_;
  std::vector<int> cuts_;
};

/// The largest number of non-empty stages <= K that some split has, times and traffic ignored; 0 if none.
int largest_feasible_stage_count(const BlockChain& chain);

}  // namespace smp::partitioner
