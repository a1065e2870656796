// Chooses between the exact chain split and placement by parameters, and enforces the memory limit.
#include "partitioner/partition/partition.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <utility>

#include "partitioner/partition/build_plan.h"
#include "partitioner/partition/chain_of_graph.h"
#include "partitioner/partition/contiguous.h"
#include "partitioner/partition/graph_costs.h"
#include "partitioner/partition/pins.h"
#include "partitioner/partition/predict_step.h"
#include "partitioner/partition/shift_cuts.h"
#include "partitioner/partition/tied_together.h"
#include "partitioner/partition/visits.h"
#include "partitioner/plan/linearise.h"

namespace smp::partitioner {
namespace {

void check_options(const Graph& graph, const PartitionOptions& options) {
  TORCH_CHECK_VALUE(!graph.nodes.empty(),
                    "partition: expected a graph with operators, got none. Call the model in the step body.");
  TORCH_CHECK_VALUE(options.num_ranks >= 1 && options.num_microbatches >= 1 && options.num_replicas >= 1,
                    "partition: expected num_ranks, num_microbatches and num_replicas of at least 1, got ",
                    options.num_ranks, ", ", options.num_microbatches, " and ", options.num_replicas, ".");
  TORCH_CHECK_VALUE(options.optimizer_state_factor >= 0,
                    "partition: expected optimizer_state_factor >= 0 (0 SGD, 1 momentum, 2 Adam), got ",
                    options.optimizer_state_factor, ".");
  TORCH_CHECK_VALUE(options.optimizer_workspace_factor >= 0 && options.gradient_bucket_bytes >= 0,
                    "partition: expected optimizer_workspace_factor >= 0 and gradient_bucket_bytes >= 0, got ",
                    options.optimizer_workspace_factor, " and ", options.gradient_bucket_bytes, ".");
  TORCH_CHECK_VALUE(options.schedule.virtual_stages >= 1, "partition: expected virtual_stages >= 1, got ",
                    options.schedule.virtual_stages, ".");
  TORCH_CHECK_VALUE(
      options.schedule.virtual_stages <= 1 || (options.auto_partition && options.pins.empty()),
      "partition: expected auto_partition and no module placed by hand with virtual_stages=",
      options.schedule.virtual_stages, ", got ",
      options.auto_partition ? "a placement of '" + options.pins.begin()->first + "'" : std::string("auto_partition=false"),
      ". Set virtual_stages to 1, or leave the placement to the planner.");
  TORCH_CHECK_VALUE(options.schedule.active_microbatches >= 0,
                    "partition: expected active_microbatches >= 0 (0: number of ranks), got ",
                    options.schedule.active_microbatches, ".");
  const auto ranks = static_cast<size_t>(options.num_ranks);
  TORCH_CHECK_VALUE(options.rank_speed.empty() || options.rank_speed.size() == ranks,
                    "partition: expected a speed for each of ", ranks, " ranks, got ", options.rank_speed.size(), ".");
  TORCH_CHECK_VALUE(options.rank_memory_limit_bytes.empty() || options.rank_memory_limit_bytes.size() == ranks,
                    "partition: expected a memory limit for each of ", ranks, " ranks, got ",
                    options.rank_memory_limit_bytes.size(), ".");
  for (double speed : options.rank_speed) {
    TORCH_CHECK_VALUE(std::isfinite(speed) && speed > 0, "partition: expected speeds above 0, got ", speed, ".");
  }
  check_pins(graph, options);
}

/// The blocks between allowed cuts: position of the first node of each.
std::vector<int> block_starts(const std::vector<char>& cut_allowed) {
  std::vector<int> starts;
  for (size_t p = 0; p + 1 < cut_allowed.size(); ++p) {
    if (p == 0 || cut_allowed[p]) starts.push_back(static_cast<int>(p));
  }
  return starts;
}

void add_pins(const std::vector<int>& starts, const std::vector<RankSet>& allowed, Chain& chain) {
  chain.first_stage.assign(chain.time_us.size(), 0);
  chain.last_stage.assign(chain.time_us.size(), chain.num_stages() - 1);
  for (size_t b = 0; b < starts.size(); ++b) {
    if (allowed[b].empty()) continue;
    chain.first_stage[starts[b]] = allowed[b].front();
    chain.last_stage[starts[b]] = allowed[b].back();
  }
}

StageAssignment assign(const std::vector<int>& starts, const std::vector<int>& rank_of_block,
                       const std::vector<NodeId>& order) {
  StageAssignment assignment;
  assignment.stage_of_node.resize(order.size());
  for (size_t b = 0; b < starts.size(); ++b) {
    if (b == 0 || rank_of_block[b] != rank_of_block[b - 1]) {
      assignment.rank_of_stage.push_back(rank_of_block[b]);
    }
    const size_t end = b + 1 < starts.size() ? static_cast<size_t>(starts[b + 1]) : order.size();
    for (auto p = static_cast<size_t>(starts[b]); p < end; ++p) {
      assignment.stage_of_node[order[p]] = static_cast<int>(assignment.rank_of_stage.size()) - 1;
    }
  }
  return assignment;
}

/// All limits `bytes` higher.
PartitionOptions with_more(PartitionOptions options, int64_t bytes) {
  if (options.memory_limit_bytes >= 0) options.memory_limit_bytes += bytes;
  for (int64_t& limit : options.rank_memory_limit_bytes) limit += limit >= 0 ? bytes : 0;
  return options;
}

void refuse_memory(int64_t missing, const PartitionOptions& options) {
  int64_t limit = options.memory_limit_bytes;
  for (int64_t other : options.rank_memory_limit_bytes) limit = std::max(limit, other);
  const int64_t needed = limit + missing;
  TORCH_CHECK_VALUE(
      options.rank_memory_limit_bytes.empty(), "partition: expected memory limits that are ", missing,
      " bytes higher, got at most ", limit, " with ", options.num_ranks, " ranks and ", options.num_microbatches,
      " microbatches. Raise the limit of each rank by ", missing,
      " bytes, use more ranks, more (smaller) microbatches, fewer active_microbatches, or an optimizer with less state.");
  TORCH_CHECK_VALUE(
      false, "partition: expected a memory limit of at least ", needed, " bytes per rank, got ", limit, " with ",
      options.num_ranks, " ranks and ", options.num_microbatches, " microbatches. Raise the limit to ", needed,
      " bytes, use more ranks, more (smaller) microbatches, fewer active_microbatches, or an optimizer with less state.");
}

/// A plan within the limits, or by how many bytes they were missed (more may be missing).
struct Attempt {
  std::optional<Plan> plan;
  int64_t missing_bytes = 0;
};

/// What the chain counts for a stage of `split`.
int64_t counted_bytes(const Chain& chain, const ChainSplit& split, size_t stage) {
  int64_t bytes = 0;
  for (int i = split.cuts[stage]; i < split.cuts[stage + 1]; ++i) {
    bytes += chain.fixed_bytes[i] + chain.stages[stage].in_flight * chain.activation_bytes[i];
  }
  return bytes;
}

/// The chain counts less than a stage holds (workspaces, messages, storages that several stages keep). Where the finished
/// plan is over the limit for that reason, that stage is allowed as much less than it has now and the split is made again.
Attempt split_within(const Graph& graph, const GraphCosts& costs, const Linearisation& order, Chain chain,
                     const PartitionOptions& options) {
  constexpr int kMaxSplits = 8;
  for (size_t s = 0; s < chain.stages.size(); ++s) {
    chain.stages[s].memory_bytes = options.limit_of(static_cast<int>(s) % options.num_ranks);
  }
  Attempt attempt;
  for (int i = 0; i < kMaxSplits; ++i) {
    if (const int64_t growth = smallest_memory_growth(chain); growth > 0) {
      if (i == 0) attempt.missing_bytes = growth;
      return attempt;
    }
    const ChainSplit split = split_chain(chain);
    Plan plan = build_plan(graph, costs, assign_stages(split, order.nodes, options.num_ranks), options);
    const int64_t excess = largest_excess(plan, options);
    if (excess == 0) return {std::move(plan), 0};
    attempt.missing_bytes = i == 0 ? excess : std::min(attempt.missing_bytes, excess);
    for (size_t s = 0; s < chain.stages.size(); ++s) {
      const int rank = static_cast<int>(s) % options.num_ranks;
      const int64_t limit = options.limit_of(rank);
      const int64_t over = plan.predicted_peak_bytes[static_cast<size_t>(rank)] - limit;
      if (limit < 0 || over <= 0) continue;
      const int64_t part = (over - 1) / options.schedule.virtual_stages + 1;  // of each visit
      chain.stages[s].memory_bytes = std::max<int64_t>(0, counted_bytes(chain, split, s) - part);
    }
  }
  return attempt;
}

/// First with a count that excludes no split which fits, then with one closer to what a stage holds.
Attempt split_layout(const Graph& graph, const GraphCosts& costs, const Linearisation& order, const Chain& usual,
                     const PartitionOptions& options) {
  Chain least = usual;
  least.fixed_bytes = least_bytes(graph, order.nodes, options);
  Attempt attempt = split_within(graph, costs, order, least, options);
  if (attempt.plan) return attempt;
  Attempt second = split_within(graph, costs, order, usual, options);
  if (!second.plan) second.missing_bytes = std::min(attempt.missing_bytes, second.missing_bytes);
  return second;
}

/// The limit that the message names has been tried. The least step grows, so that this ends soon.
[[noreturn]] void refuse_split(const Graph& graph, const GraphCosts& costs, const Linearisation& order, const Chain& chain,
                               Attempt attempt, const PartitionOptions& options) {
  int64_t more = 0;
  for (int64_t least_step = 1; !attempt.plan; least_step *= 2) {
    more += std::max(attempt.missing_bytes, least_step);
    attempt = split_layout(graph, costs, order, chain, with_more(options, more));
  }
  const int64_t excess = largest_excess(*attempt.plan, options);
  const bool is_enough = split_layout(graph, costs, order, chain, with_more(options, excess)).plan.has_value();
  refuse_memory(is_enough ? excess : more, options);
  TORCH_INTERNAL_ASSERT(false, "refused");
}

/// Of the plans whose slowest rank is within `kNear` of the best one's, the one with the shortest
/// step; of equal ones the first. With several visits of all: there the slowest stage says little.
Plan best_of(const PartitionOptions& options, std::vector<Plan> plans) {
  constexpr double kNear = 1.05, kBetter = 1 - 1e-9;
  const bool takes_near_only = options.schedule.virtual_stages <= 1;
  double slowest_us = plans.front().slowest_stage_us;
  for (const Plan& plan : plans) slowest_us = std::min(slowest_us, plan.slowest_stage_us);
  std::optional<size_t> best;
  for (size_t i = 0; i < plans.size(); ++i) {
    if (takes_near_only && plans[i].slowest_stage_us > kNear * slowest_us) continue;
    if (best && plans[i].predicted_step_us >= kBetter * plans[*best].predicted_step_us) continue;
    best = i;
  }
  return std::move(plans[*best]);
}

/// Tied weights exist once, and train exactly as on one process, where that costs next to nothing.
/// Where ties are exact in any case, their relays count in what it is compared with.
Plan with_or_without_ties(const Graph& graph, const GraphCosts& costs, const PartitionOptions& options, Plan apart) {
  constexpr double kNearly = 1.05;
  std::optional<Plan> together = with_ties_together(graph, costs, apart, options);
  const bool is_near = together && together->predicted_step_us <= kNearly * apart.predicted_step_us;
  return is_near ? std::move(*together) : std::move(apart);
}

/// The pins' chain in program order, if they leave a split.
std::optional<Chain> pinned_chain(const Graph& graph, const GraphCosts& costs, const Linearisation& order,
                                  const PartitionOptions& options) {
  Chain chain = make_chain(graph, costs, order, options);
  const std::vector<int> starts = block_starts(order.cut_allowed);
  add_pins(starts, allowed_ranks(graph, order.nodes, starts, options), chain);
  return pins_leave_a_split(chain) ? std::optional(std::move(chain)) : std::nullopt;
}

Plan split_pinned(const Graph& graph, const GraphCosts& costs, const Linearisation& order, const Chain& chain,
                  const PartitionOptions& options) {
  Attempt attempt = split_layout(graph, costs, order, chain, options);
  if (!attempt.plan) refuse_split(graph, costs, order, chain, std::move(attempt), options);
  return std::move(*attempt.plan);
}

/// The best split of all orders. Where the graph is large, the chain's own bound decides which orders are worth a plan.
Plan split_freely(const Graph& graph, const GraphCosts& costs, const PartitionOptions& options) {
  std::vector<double> node_us(graph.nodes.size());
  for (size_t n = 0; n < node_us.size(); ++n) node_us[n] = costs.forward_us[n] + costs.backward_us[n];
  std::vector<Plan> plans;
  for (const Linearisation& order : linearisations(graph, node_us)) {
    Attempt attempt = split_layout(graph, costs, order, make_chain(graph, costs, order, options), options);
    if (!attempt.plan) continue;
    if (options.schedule.virtual_stages > 1)
      attempt.plan = with_shifted_cuts(graph, costs, order, options, std::move(*attempt.plan));
    plans.push_back(std::move(*attempt.plan));
  }
  if (!plans.empty()) return with_or_without_ties(graph, costs, options, best_of(options, std::move(plans)));
  const Linearisation order = program_order(graph);
  return split_pinned(graph, costs, order, make_chain(graph, costs, order, options), options);
}

/// Operators where their parameters are.
Plan follow_parameters(const Graph& graph, const GraphCosts& costs, const Linearisation& order,
                       const PartitionOptions& options) {
  const std::vector<int> starts = block_starts(order.cut_allowed);
  const std::vector<RankSet> allowed = allowed_ranks(graph, order.nodes, starts, options);
  const std::vector<double> traffic_us = cut_traffic_us(graph, options.device, order.nodes);
  std::vector<double> switch_us;
  for (int start : starts) {
    switch_us.push_back(options.device.link_latency_us + traffic_us[start]);
  }
  const std::vector<int> rank_of_block =
      cheapest_ranks(allowed, switch_us, options.device.link_latency_us, options.num_ranks);
  return build_plan(graph, costs, assign(starts, rank_of_block, order.nodes), options);
}

/// The placement may come from another order than the program's; then that one may have no such plan.
Plan follow_homes(const Graph& graph, const GraphCosts& costs, const Linearisation& program,
                  const PartitionOptions& options) {
  std::optional<Plan> best;
  std::exception_ptr first_error;
  const auto attempt = [&](const Linearisation& order) {
    try {
      Plan plan = follow_parameters(graph, costs, order, options);
      if (!best || plan.stages.size() < best->stages.size()) best = std::move(plan);
    } catch (const c10::ValueError&) {
      if (!first_error) first_error = std::current_exception();
    }
  };
  attempt(program);
  if (best && best->stages.size() == 1) return std::move(*best);  // no order has fewer
  for (const Linearisation& order : linearisations(graph, costs.forward_us)) {
    if (!(order == program)) attempt(order);
  }
  if (!best) std::rethrow_exception(first_error);
  return std::move(*best);
}

Plan place(const Graph& graph, const PartitionOptions& options) {
  const GraphCosts costs = graph_costs(graph, options.device, options.measured);
  const bool is_free = options.auto_partition && options.homes.empty();
  if (is_free && options.pins.empty()) return split_freely(graph, costs, options);
  const Linearisation program = program_order(graph);
  if (is_free) {
    const auto chain = pinned_chain(graph, costs, program, options);
    if (chain) return split_pinned(graph, costs, program, *chain, options);
  }
  Plan plan = options.homes.empty() ? follow_parameters(graph, costs, program, options)
                                    : follow_homes(graph, costs, program, options);
  const int64_t excess = largest_excess(plan, options);
  if (excess > 0) refuse_memory(excess, options);
  return plan;
}

/// Whether the planner may cut more stages than ranks, for a step whose ranks take them round after round (looped.h).
bool may_loop(const Graph& graph, const PartitionOptions& options) {
  const bool is_free = options.auto_partition && options.homes.empty() && options.pins.empty();
  const bool has_order = options.schedule.kind == ScheduleKind::kInterleaved && options.schedule.active_microbatches == 0 &&
                         options.num_microbatches % options.num_ranks == 0;
  return options.num_ranks > 1 && is_free && has_order && graph.has_backward();
}

/// As many visits as each make the step, as it is predicted, a hundredth shorter or more.
Plan with_best_visits(const Graph& graph, PartitionOptions options) {
  constexpr int kMostVisits = 4;
  constexpr double kShorter = 0.99;
  Plan best = place(graph, options);
  for (int visits = 2; visits <= kMostVisits && may_loop(graph, options); ++visits) {
    options.schedule.virtual_stages = visits;
    std::optional<Plan> plan;
    try {
      plan = place(graph, options);
    } catch (const c10::ValueError&) {
      break;  // does not fit into memory: more visits keep more activations
    }
    const bool is_whole = plan->stages.size() == static_cast<size_t>(options.num_stages());
    if (!is_whole || plan->predicted_step_us > kShorter * best.predicted_step_us) break;
    best = std::move(*plan);
  }
  return best;
}

}  // namespace

Plan partition(const Graph& graph, const PartitionOptions& options) {
  check_options(graph, options);
  Plan plan = options.chooses_visits ? with_best_visits(graph, options) : place(graph, options);
  if (graph.has_backward()) plan.predicted_step_us += averaging_us(plan, options.num_replicas, options);
  return plan;
}

}  // namespace smp::partitioner
