// Stages, transfers, costs, memory and predicted step of a given assignment.
#include "partitioner/partition/build_plan.h"

#include <algorithm>

#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/operator_cost.h"
#include "partitioner/memory/peak_memory.h"
#include "partitioner/partition/predict_step.h"
#include "partitioner/plan/derive.h"
#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/stage_graph.h"
#include "partitioner/schedule/walk.h"

namespace smp::partitioner {
namespace {

void add_stage_costs(const PlanInput& input, Plan& plan) {
  for (StagePlan& stage : plan.stages) {
    const double speed = input.machine.speed_of(stage.rank);
    for (NodeId n : stage.nodes) {
      stage.cost.weight_us += input.weight_us(n) / speed;
      stage.cost.forward_us += input.costs.forward_us[n] / speed;
      stage.cost.backward_us += input.costs.backward_us[n] / speed;
      stage.cost.again_us += input.costs.again_us[n] / speed;
    }
    for (ValueId id : stage.parameters) {
      const ParameterBytes bytes = parameter_bytes(input.graph.values[id], input.behaviour.optimizer_state_factor);
      stage.cost.parameter_bytes += bytes.parameter;
      stage.cost.gradient_bytes += bytes.gradient;
      stage.cost.optimizer_bytes += bytes.optimizer;
    }
  }
}

/// Both ends of a message pay for it; within one rank nothing is sent. Step inputs leave from the first visit of rank 0.
void add_message_costs(const Graph& graph, const DeviceModel& device, Plan& plan) {
  const auto leader = std::find_if(plan.stages.begin(), plan.stages.end(), [](const auto& s) { return s.rank == 0; });
  const auto pay = [&](const Transfer& transfer) {
    if (plan.rank_of(transfer.source) == plan.rank_of(transfer.target)) return;
    const double us = device.message_us(message_bytes(graph.values[transfer.value]));
    plan.stages[transfer.target].cost.send_us += us;
    if (transfer.source != kInputStage) {
      plan.stages[transfer.source].cost.send_us += us;
    } else if (leader != plan.stages.end()) {
      leader->cost.send_us += us;
    }
  };
  for (const Transfer& transfer : plan.activations) pay(transfer);
  for (const Transfer& relay : plan.gradients) pay(relay);
}

double slowest_rank_us(const Plan& plan) {
  std::vector<double> rank_us(plan.num_ranks, 0);
  for (const StagePlan& stage : plan.stages) {
    rank_us[stage.rank] += stage.cost.forward_us + stage.cost.backward_us + stage.cost.send_us;
  }
  return *std::max_element(rank_us.begin(), rank_us.end());
}

}  // namespace

double PlanInput::weight_us(NodeId n) const {
  if (!behaviour.weight_gradients_wait) return 0;
  return parameter_share_of_backward(graph, graph.nodes[n]) * (costs.backward_us[n] - costs.again_us[n]);
}

Schedule schedule_of(const Plan& plan, const Graph& graph, int num_microbatches) {
  Schedule schedule = generate(plan.schedule, stage_graph(plan, graph), num_microbatches);
  schedule.limits_sends = may_limit_sends(schedule);
  return schedule;
}

Plan build_plan(const PlanInput& input, const StageAssignment& assignment) {
  const auto& [graph, costs, request, machine, behaviour, recomputation] = input;
  Plan plan;
  plan.num_ranks = request.num_ranks;
  plan.schedule = request.schedule;
  plan.exact_ties = request.exact_ties;
  plan.stage_of_node = assignment.stage_of_node;
  plan.recomputation = recomputation;
  plan.stages.resize(assignment.rank_of_stage.size());
  for (size_t s = 0; s < plan.stages.size(); ++s) plan.stages[s].rank = assignment.rank_of_stage[s];
  derive(graph, plan);
  add_stage_costs(input, plan);
  add_message_costs(graph, machine.device, plan);
  double speed = 0, fastest = 0;
  for (int rank = 0; rank < request.num_ranks; ++rank) {
    speed += machine.speed_of(rank);
    fastest = std::max(fastest, machine.speed_of(rank));
  }
  plan.lower_bound_us = std::max(costs.total_us / speed, costs.heaviest_us / fastest);
  plan.slowest_stage_us = slowest_rank_us(plan);
  const Schedule schedule = schedule_of(plan, graph, request.num_microbatches);
  add_memory(graph, schedule, machine.device, behaviour, plan);
  add_prediction(graph, schedule, machine.device, plan);
  return plan;
}

}  // namespace smp::partitioner
