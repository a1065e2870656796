// Chooses between the exact chain split and placement by parameters, and enforces the memory limit.
#include "partitioner/partition/partition.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "partitioner/partition/build_plan.h"
#include "partitioner/partition/chain_of_graph.h"
#include "partitioner/partition/choose_recomputation.h"
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
  const auto& [request, machine, behaviour, placement] = options;
  TORCH_CHECK_VALUE(!graph.nodes.empty(),
                    "partition: expected a graph with operators, got none. Call the model in the step body.");
  TORCH_CHECK_VALUE(request.num_ranks >= 1 && request.num_microbatches >= 1 && request.num_replicas >= 1,
                    "partition: expected num_ranks, num_microbatches and num_replicas of at least 1, got ",
                    request.num_ranks, ", ", request.num_microbatches, " and ", request.num_replicas, ".");
  TORCH_CHECK_VALUE(behaviour.optimizer_state_factor >= 0,
                    "partition: expected optimizer_state_factor >= 0 (0 SGD, 1 momentum, 2 Adam), got ",
                    behaviour.optimizer_state_factor, ".");
  TORCH_CHECK_VALUE(behaviour.optimizer_workspace_factor >= 0 && behaviour.gradient_bucket_bytes >= 0,
                    "partition: expected optimizer_workspace_factor >= 0 and gradient_bucket_bytes >= 0, got ",
                    behaviour.optimizer_workspace_factor, " and ", behaviour.gradient_bucket_bytes, ".");
  TORCH_CHECK_VALUE(request.schedule.virtual_stages >= 1, "partition: expected virtual_stages >= 1, got ",
                    request.schedule.virtual_stages, ".");
  TORCH_CHECK_VALUE(request.schedule.virtual_stages <= 1 || (placement.auto_partition && placement.pins.empty()),
                    "partition: expected auto_partition and no module placed by hand with virtual_stages=",
                    request.schedule.virtual_stages, ", got ",
                    placement.auto_partition ? "a placement of '" + placement.pins.begin()->first + "'"
                                             : std::string("auto_partition=false"),
                    ". Set virtual_stages to 1, or leave the placement to the planner.");
  TORCH_CHECK_VALUE(request.schedule.active_microbatches >= 0,
                    "partition: expected active_microbatches >= 0 (0: number of ranks), got ",
                    request.schedule.active_microbatches, ".");
  const auto ranks = static_cast<size_t>(request.num_ranks);
  TORCH_CHECK_VALUE(machine.rank_speed.empty() || machine.rank_speed.size() == ranks,
                    "partition: expected a speed for each of ", ranks, " ranks, got ", machine.rank_speed.size(), ".");
  TORCH_CHECK_VALUE(request.rank_memory_limit_bytes.empty() || request.rank_memory_limit_bytes.size() == ranks,
                    "partition: expected a memory limit for each of ", ranks, " ranks, got ",
                    request.rank_memory_limit_bytes.size(), ".");
  for (double speed : machine.rank_speed) {
    TORCH_CHECK_VALUE(std::isfinite(speed) && speed > 0, "partition: expected speeds above 0, got ", speed, ".");
  }
  check_pins(graph, placement, request.num_ranks);
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
PlanRequest with_more(PlanRequest request, int64_t bytes) {
  if (request.memory_limit_bytes >= 0) request.memory_limit_bytes += bytes;
  for (int64_t& limit : request.rank_memory_limit_bytes) limit += limit >= 0 ? bytes : 0;
  return request;
}

[[noreturn]] void refuse_memory(int64_t missing, const PlanRequest& request) {
  const auto bytes = [](int64_t number) { return std::to_string(number) + " bytes"; };
  const bool is_of_each = !request.rank_memory_limit_bytes.empty();
  int64_t limit = request.memory_limit_bytes;
  for (int64_t other : request.rank_memory_limit_bytes) limit = std::max(limit, other);
  TORCH_CHECK_VALUE(
      false, "partition: expected ",
      is_of_each ? "memory limits that are " + bytes(missing) + " higher, got at most "
                 : "a memory limit of at least " + bytes(limit + missing) + " per rank, got ",
      limit, " with ", request.num_ranks, " ranks and ", request.num_microbatches, " microbatches. Raise the limit ",
      is_of_each ? "of each rank by " + bytes(missing) : "to " + bytes(limit + missing),
      ", use more ranks, more (smaller) microbatches, fewer active_microbatches, or an optimizer with less state.");
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
Attempt split_within(const PlanInput& input, const Linearisation& order, Chain chain) {
  constexpr int kMaxSplits = 8;
  const PlanRequest& request = input.request;
  for (size_t s = 0; s < chain.stages.size(); ++s) {
    chain.stages[s].memory_bytes = request.limit_of(static_cast<int>(s) % request.num_ranks);
  }
  Attempt attempt;
  for (int i = 0; i < kMaxSplits; ++i) {
    if (const int64_t growth = smallest_memory_growth(chain); growth > 0) {
      if (i == 0) attempt.missing_bytes = growth;
      return attempt;
    }
    const ChainSplit split = split_chain(chain);
    Plan plan = build_plan(input, assign_stages(split, order.nodes, request.num_ranks));
    const int64_t excess = largest_excess(plan, request);
    if (excess == 0) return {std::move(plan), 0};
    attempt.missing_bytes = i == 0 ? excess : std::min(attempt.missing_bytes, excess);
    for (size_t s = 0; s < chain.stages.size(); ++s) {
      const int rank = static_cast<int>(s) % request.num_ranks;
      const int64_t limit = request.limit_of(rank);
      const int64_t over = plan.predicted_peak_bytes[static_cast<size_t>(rank)] - limit;
      if (limit < 0 || over <= 0) continue;
      const int64_t part = (over - 1) / request.schedule.virtual_stages + 1;  // of each visit
      chain.stages[s].memory_bytes = std::max<int64_t>(0, counted_bytes(chain, split, s) - part);
    }
  }
  return attempt;
}

/// First with a count that excludes no split which fits, then with one closer to what a stage holds.
Attempt split_layout(const PlanInput& input, const Linearisation& order, const Chain& usual) {
  Chain least = usual;
  least.fixed_bytes = least_bytes(input, order.nodes);
  Attempt attempt = split_within(input, order, least);
  if (attempt.plan) return attempt;
  Attempt second = split_within(input, order, usual);
  if (!second.plan) second.missing_bytes = std::min(attempt.missing_bytes, second.missing_bytes);
  return second;
}

/// The limit that the message names has been tried. The least step grows, so that this ends soon.
[[noreturn]] void refuse_split(const PlanInput& input, const Linearisation& order, const Chain& chain, Attempt attempt) {
  int64_t more = 0;
  for (int64_t least_step = 1; !attempt.plan; least_step *= 2) {
    more += std::max(attempt.missing_bytes, least_step);
    attempt = split_layout(input.with(with_more(input.request, more)), order, chain);
  }
  const int64_t excess = largest_excess(*attempt.plan, input.request);
  const bool is_enough = split_layout(input.with(with_more(input.request, excess)), order, chain).plan.has_value();
  refuse_memory(is_enough ? excess : more, input.request);
}

/// Of the plans whose slowest rank is within `kNear` of the best one's, the one with the shortest
/// step; of equal ones the first. With several visits of all: there the slowest stage says little.
Plan best_of(std::vector<Plan> plans) {
  constexpr double kNear = 1.05, kBetter = 1 - 1e-9;
  const bool takes_near_only = plans.front().schedule.virtual_stages <= 1;
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
Plan with_or_without_ties(const PlanInput& input, Plan apart) {
  constexpr double kNearly = 1.05;
  std::optional<Plan> together = with_ties_together(input, apart);
  const bool is_near = together && together->predicted_step_us <= kNearly * apart.predicted_step_us;
  return is_near ? std::move(*together) : std::move(apart);
}

/// The pins' chain in program order, if they leave a split.
std::optional<Chain> pinned_chain(const PlanInput& input, const Linearisation& order, const GivenPlacement& placement) {
  Chain chain = make_chain(input, order);
  const std::vector<int> starts = block_starts(order.cut_allowed);
  add_pins(starts, allowed_ranks(input.graph, order.nodes, starts, placement), chain);
  return pins_leave_a_split(chain) ? std::optional(std::move(chain)) : std::nullopt;
}

Plan split_pinned(const PlanInput& input, const Linearisation& order, const Chain& chain) {
  Attempt attempt = split_layout(input, order, chain);
  if (!attempt.plan) refuse_split(input, order, chain, std::move(attempt));
  return std::move(*attempt.plan);
}

/// The best split of all orders. Where the graph is large, the chain's own bound decides which orders are worth a plan.
Plan split_freely(const PlanInput& input) {
  std::vector<double> node_us = input.costs.forward_us;
  for (size_t n = 0; n < node_us.size(); ++n) node_us[n] += input.costs.backward_us[n];
  std::vector<Plan> plans;
  for (const Linearisation& order : linearisations(input.graph, node_us)) {
    Attempt attempt = split_layout(input, order, make_chain(input, order));
    if (!attempt.plan) continue;
    const bool is_looped = input.request.schedule.virtual_stages > 1;
    plans.push_back(is_looped ? with_shifted_cuts(input, order, std::move(*attempt.plan)) : std::move(*attempt.plan));
  }
  if (!plans.empty()) return with_or_without_ties(input, best_of(std::move(plans)));
  const Linearisation order = program_order(input.graph);
  return split_pinned(input, order, make_chain(input, order));
}

/// Operators where their parameters are.
Plan follow_parameters(const PlanInput& input, const Linearisation& order, const GivenPlacement& placement) {
  const DeviceModel& device = input.machine.device;
  const std::vector<int> starts = block_starts(order.cut_allowed);
  const std::vector<RankSet> allowed = allowed_ranks(input.graph, order.nodes, starts, placement);
  const std::vector<double> traffic_us = cut_traffic_us(input.graph, device, order.nodes);
  std::vector<double> switch_us;
  for (int start : starts) switch_us.push_back(device.link_latency_us + traffic_us[start]);
  const std::vector<int> rank_of_block = cheapest_ranks(allowed, switch_us, device.link_latency_us, input.request.num_ranks);
  return build_plan(input, assign(starts, rank_of_block, order.nodes));
}

/// The placement may come from another order than the program's; then that one may have no such plan.
Plan follow_homes(const PlanInput& input, const Linearisation& program, const GivenPlacement& placement) {
  std::optional<Plan> best;
  std::exception_ptr first_error;
  const auto attempt = [&](const Linearisation& order) {
    try {
      Plan plan = follow_parameters(input, order, placement);
      if (!best || plan.stages.size() < best->stages.size()) best = std::move(plan);
    } catch (const c10::ValueError&) {
      if (!first_error) first_error = std::current_exception();
    }
  };
  attempt(program);
  if (best && best->stages.size() == 1) return std::move(*best);  // no order has fewer
  for (const Linearisation& order : linearisations(input.graph, input.costs.forward_us)) {
    if (!(order == program)) attempt(order);
  }
  if (!best) std::rethrow_exception(first_error);
  return std::move(*best);
}

Plan place(const PlanInput& input, const GivenPlacement& placement) {
  if (placement.is_free()) return split_freely(input);
  const Linearisation program = program_order(input.graph);
  if (placement.auto_partition && placement.homes.empty()) {
    const auto chain = pinned_chain(input, program, placement);
    if (chain) return split_pinned(input, program, *chain);
  }
  Plan plan =
      placement.homes.empty() ? follow_parameters(input, program, placement) : follow_homes(input, program, placement);
  const int64_t excess = largest_excess(plan, input.request);
  if (excess > 0) refuse_memory(excess, input.request);
  return plan;
}

/// Whether the planner may cut more stages than ranks, for a step whose ranks take them round after round (looped.h).
bool may_loop(const PlanInput& input, const GivenPlacement& placement) {
  const PlanRequest& request = input.request;
  const bool has_order = request.schedule.kind == ScheduleKind::kInterleaved && request.schedule.active_microbatches == 0 &&
                         request.num_microbatches % request.num_ranks == 0;
  return request.num_ranks > 1 && placement.is_free() && has_order && input.graph.has_backward();
}

/// As many visits as each make the step, as it is predicted, a hundredth shorter or more.
Plan with_best_visits(const PlanInput& input, const GivenPlacement& placement) {
  constexpr int kMostVisits = 4;
  constexpr double kShorter = 0.99;
  Plan best = place(input, placement);
  PlanRequest looped = input.request;
  for (int visits = 2; visits <= kMostVisits && may_loop(input, placement); ++visits) {
    looped.schedule.virtual_stages = visits;
    std::optional<Plan> plan;
    try {
      plan = place(input.with(looped), placement);
    } catch (const c10::ValueError&) {
      break;  // does not fit into memory: more visits keep more activations
    }
    const bool is_whole = plan->stages.size() == static_cast<size_t>(looped.num_stages());
    if (!is_whole || plan->predicted_step_us > kShorter * best.predicted_step_us) break;
    best = std::move(*plan);
  }
  return best;
}

Plan placed(const PlanInput& input, const GivenPlacement& placement) {
  return input.request.chooses_visits ? with_best_visits(input, placement) : place(input, placement);
}

/// Cuts for a model of which nothing is kept, then as much kept as fits. In pieces as fine as the ranks are many.
std::optional<Plan> within_limits_by_both(const PlanInput& input, const GivenPlacement& placement) {
  for (int pieces = 4 * input.request.num_ranks; pieces <= 64 * input.request.num_ranks; pieces *= 2) {
    const Recomputation all = in_pieces(input, pieces);
    const GraphCosts costs = with_recomputation(input.graph, input.costs, all);
    const PlanInput recomputing{input.graph, costs, input.request, input.machine, input.behaviour, all};
    try {
      const Plan plan = placed(recomputing, placement);
      return with_as_much_kept(input, plan);
    } catch (const c10::ValueError&) {  // still too much
    }
  }
  return std::nullopt;
}

PlanRequest without_limits(PlanRequest request) {
  request.memory_limit_bytes = -1;
  request.rank_memory_limit_bytes.clear();
  return request;
}

/// Memory is kept below the limits by other cuts, or by computing again: by what is faster. A limit that the fastest plan of
/// all keeps changes nothing.
Plan placed_within_limits(const PlanInput& input, const GivenPlacement& placement) {
  Plan fastest = placed(input.with(without_limits(input.request)), placement);
  if (largest_excess(fastest, input.request) == 0) return fastest;
  std::optional<Plan> again = within_limits_by_recomputation(input, fastest), cut;
  try {
    cut = placed(input, placement);
  } catch (const c10::ValueError&) {
    if (!again) again = within_limits_by_both(input, placement);
    if (!again) refuse_memory(excess_with_recomputation(input, fastest), input.request);
  }
  const bool is_faster_cut = cut && (!again || cut->predicted_step_us <= again->predicted_step_us);
  return is_faster_cut ? std::move(*cut) : std::move(*again);
}

}  // namespace

Plan partition(const Graph& graph, const PartitionOptions& options) {
  check_options(graph, options);
  const auto& [request, machine, behaviour, placement] = options;
  const Recomputation marked = marked_recomputation(graph);
  const GraphCosts costs = with_recomputation(graph, graph_costs(graph, machine.device, machine.measured), marked);
  const PlanInput input{graph, costs, request, machine, behaviour, marked};
  const bool has_limits = request.memory_limit_bytes >= 0 || !request.rank_memory_limit_bytes.empty();
  const bool may_recompute = request.chooses_recomputation && has_limits && graph.has_backward();
  Plan plan = may_recompute ? placed_within_limits(input, placement) : placed(input, placement);
  if (graph.has_backward()) plan.predicted_step_us += averaging_us(plan, request.num_replicas, machine, behaviour);
  return plan;
}

}  // namespace smp::partitioner
