// What the operators of a stage use: its memory as blocks, when each is used, by whom it is saved, and what runs again.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "partitioner/cost/operator_table.h"
#include "partitioner/graph/gradient_flow.h"
#include "partitioner/graph/graph.h"
#include "partitioner/memory/leaving_gradients.h"
#include "partitioner/plan/plan.h"
#include "partitioner/plan/stage_roles.h"

namespace smp::partitioner {

/// What of a region runs again: what tapes leave out, or all of it, as under autograd in the first steps.
enum class RunsAgain : uint8_t { kWhatIsNotKept, kAll };

/// What of a whole plan runs again, found once for all of its stages.
struct Remade {
  std::vector<int32_t> piece{};  // by NodeId: a number for each stage's part of a region; -1: none
  std::vector<int32_t> inner{};  // by storage: inner_storages()
  std::vector<bool> nodes{};     // by NodeId: remade_nodes()
};
Remade remade_of(const Graph& graph, const GradientFlow& flow, const Plan& plan);

/// Averaging over replicas; 0 bytes: there are none.
struct BucketOptions {
  int64_t bytes = 0;
  bool are_shared = false;
};

class StageUses {
 public:
  static constexpr int32_t kNone = -1;

  struct NodeUse {
    const Node& node;
    const OperatorRow& row;
    std::vector<ValueId> inputs;
    std::vector<int32_t> saved;  // blocks
    int64_t extra_saved_bytes = 0;
    bool has_backward = false;
    int32_t run = kNone;    // of those that are recomputed together
    bool is_again = false;  // runs a second time
  };
  struct Block {
    int32_t storage;
    size_t first_use = 0, last_use = 0;
    bool is_used = false;
    bool is_own = false;  // made here; inputs of rank 0 are the step's
    bool is_received = false;
    bool is_turned = false;  // with a view whose dimensions are in another order
    bool is_kept = false;    // until the end of the forward
    bool is_root = false;    // until the backward begins
    bool is_result = false;  // until the step ends
    int num_savers = 0;      // operators whose backward is still to come, and regions that are still to run again
    bool is_held = false;
    bool is_again = false;  // made a second time
  };
  /// Operators that run again before their backward, by position.
  struct Run {
    size_t begin, end;
    std::vector<std::vector<int32_t>> dying{};  // by position from `begin`: blocks that nobody in the run uses behind it
    std::set<int32_t> held{};                   // blocks that it finds when it runs again
  };

  StageUses(const Graph& graph, const GradientFlow& flow, const Plan& plan, int stage, const BucketOptions& averaged,
            int64_t allocation_bytes, const Remade& remade, RunsAgain runs_again);

  int64_t bytes_of(const Block& block) const;
  bool is_made_in(const Run& run, const Block& block) const {
    return block.is_own && !block.is_received && run.begin <= block.first_use && block.first_use < run.end;
  }
  bool is_made_again_in(const Run& run, const Block& block) const { return block.is_again && is_made_in(run, block); }

  const StageRoles roles;
  const std::vector<char> is_permanent;  // by storage
  std::vector<int64_t> extents;          // by storage
  std::vector<int32_t> block_of;         // by storage
  std::vector<Block> blocks;
  std::vector<NodeUse> nodes;           // in program order
  std::vector<Run> runs;                // in program order
  std::vector<int32_t> first_use;       // by value: among nodes
  std::vector<GradientBucket> buckets;  // in the order in which they leave

 private:
  void add_node(NodeId n, const GradientFlow& flow, int64_t allocation_bytes);
  void find_runs(const Remade& remade, const std::vector<NodeId>& of_stage, RunsAgain runs_again);
  void add_run(Run run);
  void fill_buckets(const Plan& plan, const BucketOptions& averaged);
  void note_extent(const NodeUse& use);
  void note_turn(ValueId id);
  void note_use(ValueId id, size_t position);
  Block& block_at(int32_t storage);

  const Graph& graph_;
};

}  // namespace smp::partitioner
