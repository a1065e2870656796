// Plan to schedule to simulation.
#include "partitioner/plan/predict_step.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <utility>

#include "partitioner/plan/graph_costs.h"
#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {

SimulationInput predicted_times(const Graph& graph, const Plan& plan, const DeviceModel& device) {
  SimulationInput input;
  input.transfers_occupy_ranks = true;
  for (const StagePlan& stage : plan.stages) {
    input.times.push_back({stage.cost.forward_us, stage.cost.backward_us, stage.cost.rest_us});
  }
  std::map<Edge, double> edge_us;
  for (const auto* transfers : {&plan.activations, &plan.gradients}) {
    for (const Transfer& transfer : *transfers) {
      edge_us[{transfer.source, transfer.target}] +=
          device.message_us(message_bytes(graph.values[transfer.value]));
    }
  }
  for (const auto& [edge, us] : edge_us) input.transfers.push_back({edge, us});
  return input;
}

namespace {

/// Draws of steps.
class JitteredSteps {
 public:
  JitteredSteps(const Schedule& schedule, SimulationInput input, double jitter)
      : schedule_(schedule), input_(std::move(input)), steady_(std::exchange(input_.times, {})), jitter_(jitter) {
    input_.microbatch_times.assign(steady_.size(), std::vector<StageTime>(static_cast<size_t>(schedule.num_microbatches)));
  }

  /// Mean of the longest of `num_replicas` steps.
  double mean_us(int num_replicas) {
    std::vector<double> makespans_us(num_draws());
    for (double& us : makespans_us) us = draw_us();
    std::sort(makespans_us.begin(), makespans_us.end());
    // The i-th of n is the longest of R where all of them are among the first i, and not all among those before.
    const auto n = static_cast<double>(makespans_us.size());
    double mean_us = 0;
    for (size_t i = 0; i < makespans_us.size(); ++i) {
      const auto before = static_cast<double>(i);
      mean_us += (std::pow((before + 1) / n, num_replicas) - std::pow(before / n, num_replicas)) * makespans_us[i];
    }
    return mean_us;
  }

 private:
  size_t num_draws() const {
    size_t num_actions = 0;
    for (const auto& column : schedule_.columns) num_actions += column.size();
    return std::clamp<size_t>(kMostActions / std::max<size_t>(1, num_actions), 4, 32);
  }

  // Every second step is the one before with the opposite sign, so that their mean times are those of the plan.
  double draw_us() {
    const auto before = random_;
    random_ = is_opposite_ ? repeated_ : before;
    for (size_t s = 0; s < steady_.size(); ++s) {
      for (StageTime& time : input_.microbatch_times[s]) {
        const double forward = factor(), backward = factor();
        time = {steady_[s].forward_us * forward, steady_[s].backward_us * backward, steady_[s].rest_us * backward};
      }
    }
    repeated_ = before;
    normal_.reset();
    is_opposite_ = !is_opposite_;
    return simulate(schedule_, input_).makespan_us;
  }

  double factor() { return std::max(0.2, 1 + (is_opposite_ ? -jitter_ : jitter_) * normal_(random_)); }

  static constexpr size_t kMostActions = 100'000;  // simulated, so that planning stays quick

  const Schedule& schedule_;
  SimulationInput input_;
  const std::vector<StageTime> steady_;
  const double jitter_;
  bool is_opposite_ = false;
  std::mt19937_64 random_, repeated_;  // from the same seed in all predictions
  std::normal_distribution<double> normal_;
};

}  // namespace

StepPrediction predict_step(const Graph& graph, const Plan& plan, const PartitionOptions& options) {
  const StageGraph stages = stage_graph(plan, graph);
  const Schedule schedule = generate(options.schedule, stages, options.num_microbatches,
                                     {.active_microbatches = options.active_microbatches,
                                      .times = {},
                                      .virtual_stages = options.virtual_stages});
  const SimulationInput times = predicted_times(graph, plan, options.device);
  const Simulation simulation = simulate(schedule, times);
  const double jitter = options.measured == nullptr ? 0 : options.measured->jitter_of(graph);
  const double us = jitter > 0 ? JitteredSteps(schedule, times, jitter).mean_us(options.num_replicas) : simulation.makespan_us;
  const double bodies_us = options.device.body_us * static_cast<double>(graph.nodes.size()) * options.num_microbatches;
  return {bodies_us + us, simulation.bubble};
}

}  // namespace smp::partitioner
