// Plan to schedule to simulation.
#include "partitioner/partition/predict_step.h"

#include <map>

#include "partitioner/partition/graph_costs.h"
#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

SimulationInput predicted_times(const Graph& graph, const Plan& plan, const DeviceModel& device) {
  SimulationInput input;
  input.transfers_occupy_ranks = true;
  for (const StagePlan& stage : plan.stages) {
    input.times.push_back({stage.cost.forward_us, stage.cost.backward_us - stage.cost.weight_us, stage.cost.weight_us});
  }
  std::map<Edge, double> edge_us;
  for (const auto* transfers : {&plan.activations, &plan.gradients}) {
    for (const Transfer& transfer : *transfers) {
      edge_us[{transfer.source, transfer.target}] += device.message_us(message_bytes(graph.values[transfer.value]));
    }
  }
  for (const auto& [edge, us] : edge_us) input.transfers.push_back({edge, us});
  return input;
}

StepPrediction predict_step(const Graph& graph, const Plan& plan, const PartitionOptions& options) {
  const Schedule schedule = generate(plan.schedule, stage_graph(plan, graph), options.num_microbatches);
  const Simulation simulation = simulate(schedule, predicted_times(graph, plan, options.device));
  const double bodies_us = options.device.body_us * static_cast<double>(graph.nodes.size()) * options.num_microbatches;
  return {bodies_us + simulation.makespan_us, simulation.bubble};
}

}  // namespace smp::partitioner
