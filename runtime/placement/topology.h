// Owns where a world rank sits among replicas, pipeline stages and tensor shards. Arithmetic only.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace smp::runtime {

/// The process groups of a world; every rank belongs to one of each kind.
enum class GroupKind {
  kWorld,
  kModelParallel,  ///< one full replica of the model: pp x tp ranks
  kDataParallel,   ///< the ranks with my stage: world / pp ranks
  kPipeline,       ///< the stages of one replica and one tensor shard
  kTensor,         ///< the shards of one stage of one replica
  kReducedData,    ///< the ranks that hold exactly my parameters
};

/// How many ranks share one replica of the model.
struct ParallelDegrees {
  int pipeline_degree = 1;
  int tensor_degree = 1;
};

/// World rank -> (reduced-data, pipeline, tensor) coordinates.
///
/// The strategy orders the letters D, P and T; the right-most varies fastest with the world rank.
/// "cluster" is DPT: neighbouring ranks form one replica. "spread" is TPD.
///
///   Topology topology(8, {.pipeline_degree = 2, .tensor_degree = 2});
///   topology.coordinates(5);                       // {.rdp_rank = 1, .pp_rank = 0, .tp_rank = 1}
///   topology.group(GroupKind::kPipeline, 5);       // {5, 7}
class Topology {
 public:
  struct Coordinates {
    int rdp_rank = 0;
    int pp_rank = 0;
    int tp_rank = 0;
    bool operator==(const Coordinates&) const = default;
  };

  /// Throws c10::ValueError when the degrees do not divide world_size or the strategy is unknown.
  explicit Topology(int world_size, ParallelDegrees degrees = {}, std::string_view strategy = "cluster");

  int world_size() const { return world_size_; }
  /// Throws c10::IndexError outside 0 <= world_rank < world_size().
  Coordinates coordinates(int world_rank) const;

  /// World ranks of the group of `kind` that `world_rank` belongs to, ascending.
  std::vector<int> group(GroupKind kind, int world_rank) const;
  /// Index of `world_rank` in that group.
  int group_rank(GroupKind kind, int world_rank) const;
  int group_size(GroupKind kind) const;

 private:
  int world_size_;
  ParallelDegrees degrees_;
  int rdp_degree_;
  std::string letters_;  // slowest first
};

}  // namespace smp::runtime
