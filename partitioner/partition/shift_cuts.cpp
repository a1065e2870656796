// Coordinate descent over cuts; a trial costs a simulation, not a plan.
#include "partitioner/partition/shift_cuts.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "partitioner/graph/gradient_flow.h"
#include "partitioner/partition/chain_messages.h"
#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/simulate.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {
namespace {

/// Position of the first operator of each stage, and the end.
std::vector<int> cuts_of(const Plan& plan, const std::vector<NodeId>& order) {
  std::vector<int> cuts(plan.stages.size() + 1, 0);
  for (int p = 0; p < std::ssize(order); ++p) cuts[static_cast<size_t>(plan.stage_of_node[order[p]]) + 1] = p + 1;
  return cuts;
}

class CutShifter {
 public:
  CutShifter(const PlanInput& input, const Linearisation& order, const Plan& plan)
      : order_(order),
        request_(input.request),
        machine_(input.machine),
        stages_(stage_graph(plan, input.graph)),
        crossings_(crossings(input.graph, input.machine.device, order.nodes)),
        until_(1, StageTime{{}}),
        num_trained_until_(1, 0) {
    const GradientFlow flow(input.graph);
    const GraphCosts& costs = input.costs;
    for (NodeId n : order.nodes) {
      num_trained_until_.push_back(num_trained_until_.back() + static_cast<int>(flow.passes_gradient(n)));
      const StageTime& before = until_.back();
      const double weight_us = input.weight_us(n);
      const auto& [forward_until_us, backward_until_us, weight_until_us] = before.us;
      until_.push_back({forward_until_us + costs.forward_us[n], backward_until_us + costs.backward_us[n] - weight_us,
                        weight_until_us + weight_us});
    }
    mean_us_ = time_us(0, static_cast<int>(order.nodes.size())) / static_cast<double>(plan.stages.size());
  }

  std::vector<int> shift(std::vector<int> cuts) {
    constexpr size_t kMostActions = 390'000;  // simulated for each reach, so that planning stays quick
    double best_us = step_us(cuts);
    for (const double reach : {2.0, 0.5, 0.1}) {
      num_actions_left_ = kMostActions;
      while (num_actions_left_ > 0) {
        const double before_us = best_us;
        for (size_t c = 1; c + 1 < cuts.size(); ++c) shift_one(c, reach, best_us, cuts);
        for (size_t c = 1; c + 2 < cuts.size(); ++c) shift_two(c, reach, best_us, cuts);
        if (best_us >= before_us) break;
      }
    }
    return cuts;
  }

 private:
  double time_us(int begin, int end) const {
    const StageTime &from = until_[static_cast<size_t>(begin)], &to = until_[static_cast<size_t>(end)];
    return to.total_us() - from.total_us();
  }

  /// Of the places between two cuts for one that is at `cut`: those not further than `reach` times a mean stage, at most
  /// `most`.
  std::vector<int> places(int after, int before, int cut, double reach, size_t most) const {
    std::vector<int> near;
    for (int p = after + 1; p < before; ++p) {
      const bool is_near = std::abs(time_us(std::min(p, cut), std::max(p, cut))) <= reach * mean_us_;
      if (is_near && order_.cut_allowed[static_cast<size_t>(p)]) near.push_back(p);
    }
    const size_t stride = (near.size() + most - 1) / most;
    std::vector<int> tried;
    for (size_t i = 0; i < near.size(); i += stride) tried.push_back(near[i]);
    return tried;
  }

  void shift_one(size_t c, double reach, double& best_us, std::vector<int>& cuts) {
    constexpr size_t kMost = 32;
    std::vector<int> moved = cuts;
    for (const int place : places(cuts[c - 1], cuts[c + 1], cuts[c], reach, kMost)) {
      moved[c] = place;
      take_better(moved, best_us, cuts);
    }
  }

  /// A stage moves: between the two no single cut may be better.
  void shift_two(size_t c, double reach, double& best_us, std::vector<int>& cuts) {
    constexpr size_t kMost = 8;
    std::vector<int> moved = cuts;
    for (const int first : places(cuts[c - 1], cuts[c + 2] - 1, cuts[c], reach, kMost)) {
      moved[c] = first;
      for (const int second : places(first, moved[c + 2], moved[c + 1], reach, kMost)) {
        std::vector<int> both = moved;
        both[c + 1] = second;
        take_better(both, best_us, cuts);
      }
    }
  }

  void take_better(const std::vector<int>& moved, double& best_us, std::vector<int>& cuts) {
    constexpr double kBetter = 1 - 1e-9;
    if (num_actions_left_ == 0) return;
    const double us = step_us(moved);
    if (us < kBetter * best_us) best_us = us, cuts = moved;
  }

  /// Whether a stage between two cuts has a backward.
  bool is_trained(int begin, int end) const {
    return num_trained_until_[static_cast<size_t>(end)] > num_trained_until_[static_cast<size_t>(begin)];
  }

  const Schedule& schedule(StageGraph stages) {
    const auto found =
        std::find_if(schedules_.begin(), schedules_.end(), [&](const auto& known) { return known.first == stages; });
    if (found != schedules_.end()) return found->second;
    Schedule generated = generate(request_.schedule, stages, request_.num_microbatches);
    return schedules_.emplace_back(std::move(stages), std::move(generated)).second;
  }

  /// What is sent between stages; step inputs by the first one.
  std::map<Edge, double> transfers_us(const std::vector<int>& cuts) const {
    const std::vector<int> stage_of = stages_between(cuts);
    std::map<Edge, double> edges;
    for (const Crossing& crossing : crossings_) {
      for_each_message(crossing, stage_of, [&](int lower, int higher) {
        edges[crossing.is_relayed ? Edge{higher, lower} : Edge{lower, higher}] += crossing.us;
      });
    }
    return edges;
  }

  /// As add_prediction() makes it of mean times.
  double step_us(const std::vector<int>& cuts) {
    SimulationInput input;
    input.transfers_occupy_ranks = true;
    StageGraph stages = stages_;
    stages.activations.clear(), stages.gradients.clear();
    for (size_t s = 0; s + 1 < cuts.size(); ++s) stages.stage_has_backward[s] = is_trained(cuts[s], cuts[s + 1]);
    for (const auto& [edge, us] : transfers_us(cuts)) {
      input.transfers.push_back({edge, us});
      const bool is_gradient = edge.source > edge.target;
      (is_gradient ? stages.gradients : stages.activations).push_back(edge);
      if (!is_gradient) continue;
      for (const int end : {edge.source, edge.target}) stages.stage_has_backward[static_cast<size_t>(end)] = true;
    }
    for (size_t s = 0; s + 1 < cuts.size(); ++s) {
      const StageTime &from = until_[static_cast<size_t>(cuts[s])], &to = until_[static_cast<size_t>(cuts[s + 1])];
      const double speed = machine_.speed_of(static_cast<int>(s) % request_.num_ranks);
      StageTime& time = input.times.emplace_back();
      for (size_t i = 0; i < kNumComputations; ++i) time.us[i] = std::max(0.0, to.us[i] - from.us[i]) / speed;
    }
    const Schedule& actions = schedule(std::move(stages));
    for (const auto& column : actions.columns) num_actions_left_ -= std::min(num_actions_left_, column.size());
    return simulate(actions, input).makespan_us;
  }

  const Linearisation& order_;
  const PlanRequest& request_;
  const Machine& machine_;
  const StageGraph stages_;  // of the plan that the search begins with
  const std::vector<Crossing> crossings_;
  std::vector<std::pair<StageGraph, Schedule>> schedules_;  // known
  std::vector<StageTime> until_;                            // by position, of the operators before it
  std::vector<int> num_trained_until_;                      // of them
  double mean_us_ = 0;                                      // of a stage
  size_t num_actions_left_ = 0;                             // to be simulated
};

}  // namespace

Plan with_shifted_cuts(const PlanInput& input, const Linearisation& order, Plan plan) {
  ChainSplit split;
  split.num_used_stages = static_cast<int>(plan.stages.size());
  const std::vector<int> cuts = cuts_of(plan, order.nodes);
  split.cuts = CutShifter(input, order, plan).shift(cuts);
  if (split.cuts == cuts) return plan;
  Plan shifted = build_plan(input, assign_stages(split, order.nodes, input.request.num_ranks));
  const bool is_better = shifted.predicted_step_us < plan.predicted_step_us;
  return is_better && largest_excess(shifted, input.request) == 0 ? std::move(shifted) : std::move(plan);
}

}  // namespace smp::partitioner
