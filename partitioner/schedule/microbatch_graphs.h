// The stage graphs of one step, by microbatch, with their neighbours. Internal to the schedule
// room.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "partitioner/schedule/neighbours.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

/// Borrows the graphs, which most often are one and the same.
class MicrobatchGraphs {
 public:
  /// Throws c10::ValueError for no microbatch, an invalid graph, or stages that differ between
  /// microbatches.
  explicit MicrobatchGraphs(std::span<const StageGraph* const> graph_of_microbatch);

  int num_microbatches() const { return static_cast<int>(graphs_.size()); }
  int num_ranks() const { return graphs_[0]->num_ranks; }
  int num_stages() const { return graphs_[0]->num_stages(); }
  int rank_of(int stage) const { return graphs_[0]->rank_of(stage); }
  bool is_local(int stage, int other) const { return rank_of(stage) == rank_of(other); }
  bool has_backward(int stage, int microbatch) const {
    return graphs_[microbatch]->stage_has_backward[stage];
  }
  const Neighbours& neighbours(int microbatch) const { return *neighbours_[microbatch]; }

 private:
  std::vector<const StageGraph*> graphs_;
  std::map<const StageGraph*, Neighbours> owned_;
  std::vector<const Neighbours*> neighbours_;  // by microbatch, into owned_
};

}  // namespace smp::partitioner
