// One question to a chain of blocks: of the splits in which no stage is slower than T, which is best? The search for the
// least T is in contiguous.cpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "partitioner/partition/chain.h"
#include "partitioner/partition/chain_messages.h"
#include "partitioner/partition/stage_begins.h"

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

/// Splits into exactly `num_stages` non-empty stages, of which none costs more than T.
///
/// Dynamic programming between bounds of the cuts (Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D
/// partitioning", J. Parallel and Distributed Computing 64, 2004), with messages, memory and pins. First, from the last
/// stage to the first, a bound for every cut: borders before it leave the rest too little time, whatever is cut there. Then,
/// stage after stage, all borders behind the bounds that can be reached, with the best way to each: narrow bands when T is
/// near the optimum. While the end of a stage moves right, `begins_` keeps what it costs from every reached begin: a block,
/// and a message, change the costs of a range of begins. So a stage takes O(messages sqrt(borders)) in most cases.
class ChainProbe {
 public:
  ChainProbe(const BlockChain& chain, int num_stages);

  /// Whether the bounds leave a split in which no stage is slower than `limit_us`. Much cheaper than `least`.
  bool may_reach(double limit_us);

  /// The least aim of the splits in which no stage is slower than `limit_us`; none if there is no such split. Then `cuts`
  /// are those of the one that has it, of equal ones with the earliest cuts, last cut first.
  std::optional<double> least(Aim aim, double limit_us);
  const std::vector<int>& cuts() const { return cuts_; }  // num_stages + 1 borders

 private:
  /// A border that a stage can end at.
  struct Reached {
    int border = 0;
    size_t parent = 0;  // where in reached_ the stage begins
    double aim_us = 0;  // of all stages so far
  };

  bool sweep(int stage, Aim aim, double limit_us);
  /// `begins_` are the borders that the stage before `stage` reached; then, that a stage takes in `block` as well.
  void take_begins(int stage, Aim aim);
  void take_in(int block, int first_begin);
  void backtrack();
  int latest_border(int stage_count) const;

  const BlockChain& chain_;
  int num_stages_;
  std::vector<int> earliest_;            // by number of finished stages: later stages fit in time from here on only
  std::vector<Reached> reached_;         // all stages one after another
  size_t stage_begin_ = 0;               // where in it the begins of the stage to be swept are
  StageBegins begins_;                   // of that stage
  std::vector<size_t> index_of_border_;  // the first of them at a border or behind it; borders count from the first begin
  std::vector<int> cuts_;
};

/// The largest number of non-empty stages <= K that some split has, times and traffic ignored; 0 if none.
int largest_feasible_stage_count(const BlockChain& chain);

}  // namespace smp::partitioner
