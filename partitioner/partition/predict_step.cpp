// Plan and schedule to simulation; rings of replicas.
#include "partitioner/partition/predict_step.h"

#include <algorithm>
#include <map>

#include "partitioner/partition/graph_costs.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {
namespace {

int64_t most_gradients(const Plan& plan) {
  std::vector<int64_t> bytes(static_cast<size_t>(plan.num_ranks), 0);
  for (const StagePlan& stage : plan.stages) bytes[stage.rank] += stage.cost.gradient_bytes;
  return *std::max_element(bytes.begin(), bytes.end());
}

}  // namespace

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

void add_prediction(const Graph& graph, const Schedule& schedule, const DeviceModel& device, Plan& plan) {
  const Simulation simulation = simulate(schedule, predicted_times(graph, plan, device));
  const double bodies_us = device.body_us * static_cast<double>(graph.nodes.size()) * schedule.num_microbatches;
  plan.predicted_step_us = bodies_us + simulation.makespan_us;
  plan.predicted_bubble = simulation.bubble;
}

double averaging_us(const DeviceModel& device, int64_t bytes, int replicas, int64_t bucket_bytes) {
  if (replicas <= 1 || bytes == 0) return 0;
  const int64_t bucket = bucket_bytes > 0 ? std::min(bytes, bucket_bytes) : bytes;
  const int64_t num_buckets = (bytes + bucket - 1) / bucket;
  const double messages = 2.0 * (replicas - 1);
  // A part of a bucket leaves while another comes.
  const double part_us = device.message_us(bucket / replicas);
  return static_cast<double>(num_buckets) * messages * part_us;
}

double averaging_us(const Plan& plan, int replicas, const Machine& machine, const RuntimeBehaviour& behaviour) {
  const int64_t bytes = most_gradients(plan);
  const double us_per_mib = machine.measured != nullptr ? machine.measured->averaging_us_per_mib() : 0;
  if (us_per_mib == 0 || replicas == 1) {
    return averaging_us(machine.device, bytes, replicas, behaviour.gradient_bucket_bytes);
  }
  // Of what two replicas take. In shared memory each reads and writes as much however many they are.
  const double share = behaviour.gradients_share_memory ? 1 : 2.0 * (replicas - 1) / replicas;
  return share * us_per_mib * static_cast<double>(bytes) / (1 << 20);
}

}  // namespace smp::partitioner
