// The stage graphs of one step, by microbatch, with their neighbours. Internal to the schedule room.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

/// The stages on the other end of each stage's edges of one direction, ascending. Step inputs appear as source kInputStage.
struct Neighbours {
  Neighbours(int num_stages, const std::vector<Edge>& edges);

  std::vector<std::vector<int>> sources;  // by target stage
  std::vector<std::vector<int>> targets;  // by source stage, without the step inputs
};

/// Borrows the graphs, which most often are one and the same. One pointer is one program: stage
/// numbers belong to a program, and one number says nothing about the same number of another.
class MicrobatchGraphs {
 public:
  /// Throws c10::ValueError for no microbatch, an invalid graph, or numbers of ranks that differ.
  explicit MicrobatchGraphs(std::span<const StageGraph* const> graph_of_microbatch);

  int num_microbatches() const { return static_cast<int>(graphs_.size()); }
  int num_ranks() const { return graphs_[0]->num_ranks; }
  int num_programs() const { return static_cast<int>(owned_.size()); }
  /// 0, 1, ... in the order in which the microbatches bring them.
  int program_of(int microbatch) const { return programs_[microbatch]->number; }
  int num_stages(int microbatch) const { return graphs_[microbatch]->num_stages(); }
  int most_stages() const;  // of a program
  int rank_of(int stage, int microbatch) const { return graphs_[microbatch]->rank_of(stage); }
  bool is_local(int stage, int other, int microbatch) const {
    return rank_of(stage, microbatch) == rank_of(other, microbatch);
  }
  bool has_backward(int stage, int microbatch) const { return graphs_[microbatch]->stage_has_backward[stage]; }
  /// By the edges of activations, or by those of gradients.
  const Neighbours& neighbours(int microbatch, bool is_forward) const {
    return is_forward ? programs_[microbatch]->activations : programs_[microbatch]->gradients;
  }

 private:
  struct Program {
    int number = 0;
    Neighbours activations, gradients;
  };
  std::vector<const StageGraph*> graphs_;
  std::map<const StageGraph*, Program> owned_;
  std::vector<const Program*> programs_;  // by microbatch, into owned_
};

}  // namespace smp::partitioner
