// The programs of a job on one rank: graph, plan, stages and schedules, by the hash of the graph.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "partitioner/cost/measured_costs.h"
#include "partitioner/partition/partition.h"
#include "partitioner/plan/plan.h"
#include "partitioner/schedule/generate.h"
#include "runtime/placement/placement.h"
#include "smp/engine/context/context.h"
#include "smp/engine/models/models.h"
#include "smp/engine/models/program.h"
#include "smp/engine/optimizer_view.h"

namespace smp::engine {

/// A table, or a part of the fill-drain table: all forwards, or all backwards.
enum class TablePart { kWhole, kForward, kBackward };

class Programs {
 public:
  Programs(Context& context, const Models& models) : context_(context), models_(models) {}

  std::shared_ptr<Program> find(uint64_t hash) const;
  void clear();
  /// Forgets a program, the tables it is part of and the message buffers that only those need.
  void erase(uint64_t hash);
  /// Plans a graph on the leader, for steps of that many microbatches: what is placed stays there, the rest is placed
  /// freely.
  partitioner::Plan make_plan(const partitioner::Graph& graph, const runtime::TensorHomes& placed,
                              int num_microbatches) const;
  /// How a graph like this one is planned as things are: by configuration and placement. For a number of microbatches
  /// that is still to be set.
  partitioner::PartitionOptions options(const partitioner::Graph& graph) const;
  /// Takes a program in and prepares this rank's stages.
  std::shared_ptr<Program> add(partitioner::Graph graph, partitioner::Plan plan, uint64_t hash);
  /// The checked table for these programs, one per microbatch. Throws c10::ValueError when they have different stages.
  /// A reference holds until the next call.
  const partitioner::Schedule& schedule(const std::vector<Program*>& microbatches, TablePart part);
  /// Forgets the programs used least recently, beyond a number, and returns their hashes. To be called on the leader
  /// when no step runs. Warns once, when as many have gone as may stay.
  std::vector<uint64_t> forget_least_used(size_t max_programs);
  /// Times of operators; empty unless they were measured. Later plans are made from them.
  partitioner::MeasuredCosts& measured_costs() { return costs_; }
  /// What the optimizer adds to the memory of later plans; of several the largest counts.
  void add_optimizer(const OptimizerMemory& memory);

 private:
  struct Table {
    partitioner::Schedule schedule;
    std::map<int64_t, int64_t> buffers;  // of its messages on this rank: how many of each size
    uint64_t last_use = 0;
  };
  Table make_table(const std::vector<Program*>& microbatches, TablePart part) const;
  bool shares_memory() const;
  void forget_least_used_tables();
  void release_buffers();
  /// By parameter among `homes`, the rank that adds up its gradient in the programs that exist.
  std::map<std::string, int> adders(const runtime::TensorHomes& homes) const;
  partitioner::PartitionOptions options_on(const partitioner::Graph& graph, const runtime::TensorHomes& homes,
                                           int num_microbatches) const;

  Context& context_;
  const Models& models_;
  OptimizerMemory optimizer_;
  partitioner::MeasuredCosts costs_;
  uint64_t num_uses_ = 0;
  size_t num_forgotten_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Program>> programs_;
  std::map<std::vector<uint64_t>, Table> tables_;  // by part and the microbatches' hashes
};

}  // namespace smp::engine
