// Owns the arithmetic of rank placement: a world rank is a three-digit number in mixed radix.
#include "runtime/placement/topology.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace smp::runtime {
namespace {

std::string letters_of(std::string_view strategy) {
  if (strategy == "cluster") return "DPT";
  if (strategy == "spread") return "TPD";
  std::string sorted(strategy);
  std::sort(sorted.begin(), sorted.end());
  TORCH_CHECK_VALUE(sorted == "DPT", "placement_strategy: expected cluster, spread or an order of the ",
                    "letters D, P and T (DPT, DTP, PDT, PTD, TDP, TPD), got '", strategy, "'.");
  return std::string(strategy);
}

bool is_same_group(GroupKind kind, const Topology::Coordinates& a, const Topology::Coordinates& b) {
  switch (kind) {
    case GroupKind::kWorld:
      return true;
    case GroupKind::kModelParallel:
      return a.rdp_rank == b.rdp_rank;
    case GroupKind::kDataParallel:
      return a.pp_rank == b.pp_rank;
    case GroupKind::kPipeline:
      return a.rdp_rank == b.rdp_rank && a.tp_rank == b.tp_rank;
    case GroupKind::kTensor:
      return a.rdp_rank == b.rdp_rank && a.pp_rank == b.pp_rank;
    case GroupKind::kReducedData:
      return a.pp_rank == b.pp_rank && a.tp_rank == b.tp_rank;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown GroupKind ", static_cast<int>(kind));
}

}  // namespace

Topology::Topology(int world_size, ParallelDegrees degrees, std::string_view strategy)
    : world_size_(world_size), degrees_(degrees), letters_(letters_of(strategy)) {
  const auto [pipeline, tensor] = degrees;
  TORCH_CHECK_VALUE(world_size >= 1 && pipeline >= 1 && tensor >= 1,
                    "topology: expected a world size and degrees of at least 1, got world size ", world_size,
                    ", pipeline_parallel_degree ", pipeline, ", tensor_parallel_degree ", tensor, ".");
  const int64_t replica_size = static_cast<int64_t>(pipeline) * tensor;
  TORCH_CHECK_VALUE(world_size % replica_size == 0, "topology: expected a world size divisible by ",
                    "pipeline_parallel_degree x tensor_parallel_degree = ", pipeline, " x ", tensor, " = ", replica_size,
                    ", got ", world_size, " rank", world_size == 1 ? "" : "s", ". Start a multiple of ", replica_size,
                    " processes, or change the degrees.");
  rdp_degree_ = static_cast<int>(world_size / replica_size);
}

Topology::Coordinates Topology::coordinates(int world_rank) const {
  TORCH_CHECK_INDEX(world_rank >= 0 && world_rank < world_size_, "topology: expected a world rank of 0 ... ",
                    world_size_ - 1, ", got ", world_rank, ".");
  Coordinates coordinates;
  int rest = world_rank;
  const auto take_digit = [&rest](int degree) { return std::exchange(rest, rest / degree) % degree; };
  for (auto letter = letters_.rbegin(); letter != letters_.rend(); ++letter) {
    if (*letter == 'D') coordinates.rdp_rank = take_digit(rdp_degree_);
    if (*letter == 'P') coordinates.pp_rank = take_digit(degrees_.pipeline_degree);
    if (*letter == 'T') coordinates.tp_rank = take_digit(degrees_.tensor_degree);
  }
  return coordinates;
}

std::vector<int> Topology::group(GroupKind kind, int world_rank) const {
  const Coordinates mine = coordinates(world_rank);
  std::vector<int> members;
  for (int other = 0; other < world_size_; ++other)
    if (is_same_group(kind, mine, coordinates(other))) members.push_back(other);
  return members;
}

int Topology::group_rank(GroupKind kind, int world_rank) const {
  const std::vector<int> members = group(kind, world_rank);
  return static_cast<int>(std::find(members.begin(), members.end(), world_rank) - members.begin());
}

int Topology::group_size(GroupKind kind) const { return static_cast<int>(group(kind, 0).size()); }

}  // namespace smp::runtime
