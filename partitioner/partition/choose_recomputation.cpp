#include "partitioner/partition/choose_recomputation.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <set>
#include <span>
#include <utility>

#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/remade_nodes.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/graph/gradient_flow.h"
#include "partitioner/memory/peak_memory.h"
#include "partitioner/partition/chain_of_graph.h"
#include "partitioner/partition/graph_costs.h"

namespace smp::partitioner {
namespace {

constexpr int kPieces[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};  // of a stage, about
constexpr int kFewPieces[] = {4, 16, 64};                              // of a large graph, where each trial takes long
constexpr size_t kLarge = 4096;                                        // operators
constexpr int kMostTrials = 32;                                        // of single results that may still fit

/// Stages in pieces, where little crosses.
class Pieces {
 public:
  explicit Pieces(const PlanInput& input) : input_(input), may_cut_before_(allowed_cuts(input.graph)) {}

  /// The regions that there are, and the rest of each stage in so many.
  Recomputation cut(const std::vector<const std::vector<NodeId>*>& stages, int pieces) const {
    Recomputation chosen = input_.recomputation;
    chosen.region.resize(input_.graph.nodes.size(), kNoRegion);
    chosen.is_kept.resize(input_.graph.nodes.size(), false);
    int32_t next = 0;
    for (const int32_t region : chosen.region) next = std::max(next, region + 1);
    for (const std::vector<NodeId>* nodes : stages) {
      const std::vector<size_t> cuts = narrow_cuts(*nodes, pieces);
      for (size_t k = 0, piece = 0; k < nodes->size(); ++k) {
        if (piece < cuts.size() && cuts[piece] == k) ++piece;
        int32_t& region = chosen.region[static_cast<size_t>((*nodes)[k])];
        if (region == kNoRegion) region = next + static_cast<int32_t>(piece);
      }
      next += static_cast<int32_t>(cuts.size()) + 1;
    }
    make_possible(input_.graph, chosen);
    return chosen;
  }

 private:
  /// Positions among `nodes`, about as many bytes of activations from each other.
  std::vector<size_t> narrow_cuts(const std::vector<NodeId>& nodes, int pieces) const {
    std::vector<int64_t> kept(nodes.size() + 1, 0);
    for (size_t k = 0; k < nodes.size(); ++k)
      kept[k + 1] = kept[k] + input_.costs.activation_bytes[static_cast<size_t>(nodes[k])];
    const std::vector<int64_t> crossing = crossing_bytes(nodes);
    std::vector<size_t> cuts;
    for (int i = 1; i < pieces; ++i) {
      const int64_t target = kept.back() / pieces * i, reach = kept.back() / pieces / 2;
      std::optional<size_t> best;
      for (size_t k = cuts.empty() ? 1 : cuts.back() + 1; k < nodes.size(); ++k) {
        const bool is_near = std::abs(kept[k] - target) <= reach;
        const bool is_cut = may_cut_before_[static_cast<size_t>(nodes[k])] != 0;
        if (is_near && is_cut && (!best || crossing[k] < crossing[*best])) best = k;
      }
      if (best) cuts.push_back(*best);
    }
    return cuts;
  }

  /// By position: of what is made before it and used behind it.
  std::vector<int64_t> crossing_bytes(const std::vector<NodeId>& nodes) const {
    const std::vector<int64_t> bytes = storage_bytes(input_.graph);
    std::vector<int64_t> change(nodes.size() + 2, 0);
    std::vector<size_t> made(bytes.size(), 0), last(bytes.size(), 0);  // positions, from 1 on
    const auto storage_of = [&](ValueId id) {
      return id == kNoValue ? -1 : input_.graph.values[static_cast<size_t>(id)].storage;
    };
    for (size_t k = 0; k < nodes.size(); ++k) {
      const Node& node = input_.graph.nodes[static_cast<size_t>(nodes[k])];
      for (const ValueId id : node.outputs) {
        if (storage_of(id) >= 0 && made[static_cast<size_t>(storage_of(id))] == 0)
          made[static_cast<size_t>(storage_of(id))] = k + 1;
      }
      for (const ValueId id : node_inputs(node)) {
        if (storage_of(id) >= 0) last[static_cast<size_t>(storage_of(id))] = k + 1;
      }
    }
    for (size_t s = 0; s < bytes.size(); ++s) {
      if (made[s] == 0 || last[s] <= made[s]) continue;
      change[made[s]] += bytes[s];
      change[last[s]] -= bytes[s];
    }
    for (size_t k = 1; k < change.size(); ++k) change[k] += change[k - 1];
    return change;
  }

  const PlanInput& input_;
  const std::vector<char> may_cut_before_;
};

class Choice {
 public:
  Choice(const PlanInput& input, const Plan& plan)
      : input_(input),
        plan_(plan),
        flow_(input.graph),
        schedule_(schedule_of(plan, input.graph, input.request.num_microbatches)) {
    for (const StagePlan& stage : plan.stages) assignment_.rank_of_stage.push_back(stage.rank);
    assignment_.stage_of_node = plan.stage_of_node;
  }

  std::optional<Plan> best_within_limits(const std::vector<const std::vector<NodeId>*>& stages) const {
    std::optional<Plan> best, keeps_nothing;
    for (Plan& nothing : plans_without(stages)) {
      if (!fits(nothing)) continue;
      Plan plan = first_ones_kept(nothing, worth_keeping(nothing.recomputation, /*for_each_byte=*/true)).plan;
      if (best && plan.predicted_step_us >= best->predicted_step_us) continue;
      best = std::move(plan);
      keeps_nothing = std::move(nothing);
    }
    return keeps_nothing ? std::optional(with_as_much_kept(std::move(*keeps_nothing))) : std::nullopt;
  }

  /// How many bytes the limits are too low by, with nothing kept.
  int64_t least_excess(const std::vector<const std::vector<NodeId>*>& stages) const {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Plan& nothing : plans_without(stages)) least = std::min(least, largest_excess(nothing, input_.request));
    return least;
  }

  /// In the order of the time that a byte saves, or in that of time: where few results are large, one may fit no more.
  Plan with_as_much_kept(Plan plan) const {
    const std::vector<NodeId> worth = worth_keeping(plan.recomputation, /*for_each_byte=*/true);
    const std::vector<NodeId> longest = worth_keeping(plan.recomputation, /*for_each_byte=*/false);
    Plan by_worth = with_others_that_fit(first_ones_kept(plan, worth), worth);
    Plan by_time = with_others_that_fit(first_ones_kept(std::move(plan), longest), longest);
    return by_time.predicted_step_us < by_worth.predicted_step_us ? std::move(by_time) : std::move(by_worth);
  }

 private:
  struct Kept {
    Plan plan;
    size_t count;  // of an order
  };

  /// With nothing kept of `stages`, by number of pieces.
  std::vector<Plan> plans_without(const std::vector<const std::vector<NodeId>*>& stages) const {
    std::vector<Plan> plans;
    std::set<std::vector<int32_t>> seen;
    const bool is_large = input_.graph.nodes.size() > kLarge;
    for (const int pieces : is_large ? std::span<const int>(kFewPieces) : std::span<const int>(kPieces)) {
      const Recomputation all = Pieces(input_).cut(stages, pieces);
      if (seen.insert(all.region).second) plans.push_back(plan_with(all));
    }
    return plans;
  }

  /// As many of the first of `order` as fit; of a large graph to within its 256th part, for each trial is a plan.
  Kept first_ones_kept(Plan plan, const std::vector<NodeId>& order) const {
    const Recomputation all = plan.recomputation;
    Kept kept{std::move(plan), 0};
    size_t too_many = order.size() + 1;
    while (too_many - kept.count > 1 + order.size() / 256) {
      const size_t middle = kept.count + (too_many - kept.count) / 2;
      Recomputation more = all;
      for (size_t i = 0; i < middle; ++i) more.is_kept[static_cast<size_t>(order[i])] = true;
      fits(more) ? void(kept.count = middle) : void(too_many = middle);
    }
    if (kept.count > 0) {
      Recomputation more = all;
      for (size_t i = 0; i < kept.count; ++i) more.is_kept[static_cast<size_t>(order[i])] = true;
      kept.plan = plan_with(more);
    }
    return kept;
  }

  Plan with_others_that_fit(Kept kept, const std::vector<NodeId>& order) const {
    Recomputation more = kept.plan.recomputation;
    const size_t most = input_.graph.nodes.size() > kLarge ? kMostTrials / 8 : kMostTrials;
    for (size_t i = kept.count + 1; i < order.size() && i <= kept.count + most; ++i) {
      const auto n = static_cast<size_t>(order[i]);
      more.is_kept[n] = true;
      more.is_kept[n] = fits(more);
    }
    return more == kept.plan.recomputation ? std::move(kept.plan) : plan_with(more);
  }

  Plan plan_with(const Recomputation& recomputation) const {
    const GraphCosts costs = with_recomputation(input_.graph, input_.costs, recomputation);
    const PlanInput input{input_.graph, costs, input_.request, input_.machine, input_.behaviour, recomputation};
    return build_plan(input, assignment_);
  }

  bool fits(const Plan& plan) const { return largest_excess(plan, input_.request) == 0; }

  /// Whether the plan would; the schedule does not depend on what runs again.
  bool fits(const Recomputation& recomputation) const {
    Plan plan = plan_;
    plan.recomputation = recomputation;
    add_memory(input_.graph, schedule_, input_.machine.device, input_.behaviour, plan);
    return fits(plan);
  }

  /// Operators that would run again: first those that take the longest, for each byte that they make or in all.
  std::vector<NodeId> worth_keeping(const Recomputation& all, bool for_each_byte) const {
    const std::vector<bool> remade = remade_nodes(input_.graph, flow_, all.region, all.is_kept);
    const std::vector<int64_t> bytes = storage_bytes(input_.graph);
    std::vector<std::pair<double, NodeId>> by_worth;
    for (size_t n = 0; n < remade.size(); ++n) {
      if (!remade[n] || all.region[n] == input_.recomputation.region_of(static_cast<NodeId>(n))) continue;  // the user's own
      int64_t made = 1;
      for (const ValueId id : input_.graph.nodes[n].outputs) {
        const int32_t storage = id == kNoValue ? -1 : input_.graph.values[static_cast<size_t>(id)].storage;
        if (for_each_byte && storage >= 0) made += bytes[static_cast<size_t>(storage)];
      }
      by_worth.emplace_back(-input_.costs.forward_us[n] / static_cast<double>(made), static_cast<NodeId>(n));
    }
    std::sort(by_worth.begin(), by_worth.end());
    std::vector<NodeId> order;
    for (const auto& [worth, n] : by_worth) order.push_back(n);
    return order;
  }

  const PlanInput& input_;
  const Plan plan_;
  const GradientFlow flow_;
  const Schedule schedule_;
  StageAssignment assignment_;
};

/// Of ranks that are over their limit.
std::vector<const std::vector<NodeId>*> stages_over(const PlanRequest& request, const Plan& plan) {
  std::vector<const std::vector<NodeId>*> stages;
  for (const StagePlan& stage : plan.stages) {
    const int64_t limit = request.limit_of(stage.rank);
    if (limit >= 0 && plan.predicted_peak_bytes[static_cast<size_t>(stage.rank)] > limit) stages.push_back(&stage.nodes);
  }
  return stages;
}

}  // namespace

std::optional<Plan> within_limits_by_recomputation(const PlanInput& input, const Plan& plan) {
  return Choice(input, plan).best_within_limits(stages_over(input.request, plan));
}

int64_t excess_with_recomputation(const PlanInput& input, const Plan& plan) {
  return Choice(input, plan).least_excess(stages_over(input.request, plan));
}

Recomputation in_pieces(const PlanInput& input, int pieces) {
  std::vector<NodeId> nodes(input.graph.nodes.size());
  std::iota(nodes.begin(), nodes.end(), 0);
  return Pieces(input).cut({&nodes}, pieces);
}

Plan with_as_much_kept(const PlanInput& input, Plan plan) { return Choice(input, plan).with_as_much_kept(std::move(plan)); }

}  // namespace smp::partitioner
