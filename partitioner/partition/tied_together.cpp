// The chain before the second visit is split as ever, with the second visit's work on the first rank's account.
#include "partitioner/partition/tied_together.h"

#include <algorithm>
#include <limits>

namespace smp::partitioner {
namespace {

/// Positions in program order of what reads shared parameters.
struct Readers {
  int last_early = -1;                               // on the rank that reads first
  int first_late = std::numeric_limits<int>::max();  // on another
};

Readers readers_of_shared(const Graph& graph, const Plan& apart, const std::vector<NodeId>& order) {
  std::vector<int> first_rank(graph.values.size(), -1);
  std::vector<char> is_shared(graph.values.size(), 0);
  const auto for_each_read = [&](const auto& visit) {
    for (size_t p = 0; p < order.size(); ++p) {
      const int rank = apart.stages[static_cast<size_t>(apart.stage_of_node[order[p]])].rank;
      for (ValueId id : node_inputs(graph.nodes[order[p]])) {
        if (graph.values[id].kind == ValueKind::kParameter) visit(id, rank, static_cast<int>(p));
      }
    }
  };
  for_each_read([&](ValueId id, int rank, int) {
    if (first_rank[id] < 0) first_rank[id] = rank;
    if (rank != first_rank[id]) is_shared[id] = 1;
  });
  Readers readers;
  for_each_read([&](ValueId id, int rank, int position) {
    if (!is_shared[id]) return;
    if (rank == first_rank[id]) {
      readers.last_early = std::max(readers.last_early, position);
    } else {
      readers.first_late = std::min(readers.first_late, position);
    }
  });
  return readers;
}

/// Operators [0, end) for one stage per rank; the first stage pays for the rest too.
Chain front_of(const Chain& all, int end, const std::vector<int64_t>& own_bytes) {
  Chain front = all;
  const auto keep = [end](auto& list, size_t extra) { list.resize(static_cast<size_t>(end) + extra); };
  keep(front.time_us, 0), keep(front.fixed_bytes, 0), keep(front.activation_bytes, 0);
  keep(front.cut_allowed, 1);
  std::erase_if(front.crossings, [end](const Crossing& crossing) { return crossing.made_at >= end; });
  // What the second visit reads is free for the first stage; the last one sends it in every split.
  for (Crossing& crossing : front.crossings) {
    std::erase_if(crossing.read_at, [end](int reader) { return reader >= end; });
  }
  for (int p = end; p < all.num_operators(); ++p) {
    front.time_us[0] += all.time_us[p];
    front.fixed_bytes[0] += own_bytes[p];
    front.activation_bytes[0] += all.activation_bytes[p];
  }
  return front;
}

}  // namespace

std::optional<Plan> with_ties_together(const PlanInput& input, const Plan& apart) {
  if (input.request.num_ranks < 2 || input.request.schedule.virtual_stages > 1) return std::nullopt;
  const Linearisation order = program_order(input.graph);
  const Readers readers = readers_of_shared(input.graph, apart, order.nodes);
  if (readers.last_early < 0 || readers.first_late > static_cast<int>(order.nodes.size())) return std::nullopt;
  int end = readers.first_late;
  while (end > readers.last_early && !order.cut_allowed[static_cast<size_t>(end)]) --end;
  if (end <= readers.last_early) return std::nullopt;
  Chain front = front_of(make_chain(input, order), end, least_bytes(input, order.nodes));
  front.first_stage.assign(static_cast<size_t>(end), 0);
  front.last_stage.assign(static_cast<size_t>(end), front.num_stages() - 1);
  front.last_stage[static_cast<size_t>(readers.last_early)] = 0;
  if (!pins_leave_a_split(front) || smallest_memory_growth(front) > 0) return std::nullopt;
  const ChainSplit split = split_chain(front);
  if (split.num_used_stages < 2) return std::nullopt;
  StageAssignment assignment = assign_stages(split, order.nodes, input.request.num_ranks);
  for (auto p = static_cast<size_t>(end); p < order.nodes.size(); ++p)
    assignment.stage_of_node[order.nodes[p]] = split.num_used_stages;
  assignment.rank_of_stage.push_back(0);
  Plan plan = build_plan(input, assignment);
  if (largest_excess(plan, input.request) > 0) return std::nullopt;
  return plan;
}

}  // namespace smp::partitioner
