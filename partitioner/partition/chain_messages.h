// What the stages of a chain of blocks send and receive: for a stage that grows at its end, and for all stages of a split.
#pragma once

#include <vector>

#include "partitioner/partition/chain.h"

namespace smp::partitioner {

/// By position, or by block: the stage that it is in, between `cuts`.
std::vector<int> stages_between(const std::vector<int>& cuts);

/// Calls `visit(lower, higher)` with the two stages of every message.
template <typename Visit>
void for_each_message(const Crossing& crossing, const std::vector<int>& stage_of, const Visit& visit) {
  int lower = stage_of[crossing.made_at], last = lower;
  for (const int reader : crossing.read_at) {
    if (stage_of[reader] == last) continue;
    last = stage_of[reader];
    visit(lower, last);
    if (crossing.is_relayed) lower = last;
  }
}

class ChainMessages {
 public:
  /// Of stages that begin at one of the borders [first, last]: they cost `us` more.
  struct Change {
    int first = 0;
    int last = 0;
    double us = 0;
  };

  /// `block_of`: by operator, ascending. Each message takes a multiple of `grain_us`.
  ChainMessages(const std::vector<Crossing>& crossings, const std::vector<int>& block_of, double grain_us);

  /// What changes when `block` is the next that stages take in, whichever border they begin at. The
  /// sum of all changes is what a stage sends and receives, with one message for each value that it
  /// makes and another reads, or as many as were counted last.
  const std::vector<Change>& changes(int block) const { return changes_[block]; }

  /// What every stage that begins at `border`, or ends there, pays at least, wherever its other end is; both add up.
  double beginning_us(int border) const { return beginning_us_[border]; }
  double ending_us(int border) const { return ending_us_[border]; }

  /// By stage: what the stages between `borders` really send and receive.
  std::vector<double> us_by_stage(const std::vector<int>& borders) const;

  /// Charges the stage that makes a value for as many messages as it sends between `borders`.
  void count(const std::vector<int>& borders);

 private:
  struct Counted {
    Crossing of_blocks;  // each once
    int num_sent = 1;    // charged to the stage that makes it, if it is read behind that
  };

  void make_changes();

  std::vector<Counted> crossings_;
  std::vector<std::vector<Change>> changes_;      // by block
  std::vector<double> beginning_us_, ending_us_;  // by border
};

}  // namespace smp::partitioner
