// Plan to schedule to simulation.
#include "partitioner/partition/predict_step.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <utility>

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
      edge_us[{transfer.source, transfer.target}] +=
          device.message_us(message_bytes(graph.values[transfer.value]));
    }
  }
  for (const auto& [edge, us] : edge_us) input.transfers.push_back({edge, us});
  return input;
}

namespace {

/// Draws of the steps of a job.
class JitteredSteps {
 public:
  /// `steady`: times by replica.
  JitteredSteps(const Schedule& schedule, const Plan& plan, std::vector<SimulationInput> steady, double jitter)
      : schedule_(schedule), plan_(plan), steady_(std::move(steady)), jitter_(jitter) {}

  /// Of the slowest replica.
  double mean_us() {
    if (jitter_ == 0) return draw_us();
    const size_t num_pairs = num_draws() / 2;
    double sum_us = 0;
    for (size_t i = 0; i < num_pairs; ++i) {
      // Each step and one with all signs the other way round, so that their mean times are those of the plan.
      const std::mt19937_64 same = random_;
      sum_us += draw_us();
      random_ = same, sign_ = -1;
      sum_us += draw_us();
      sign_ = 1;
    }
    return sum_us / (2 * static_cast<double>(num_pairs));
  }

 private:
  size_t num_draws() const {
    size_t num_actions = 0;
    for (const auto& column : schedule_.columns) num_actions += column.size();
    return std::clamp<size_t>(kMostActions / std::max<size_t>(1, num_actions * steady_.size()), 4, 32);
  }

  double draw_us() {
    double longest_us = 0;
    for (const SimulationInput& steady : steady_) longest_us = std::max(longest_us, simulate(schedule_, jittered(steady)).makespan_us);
    return longest_us;
  }

  // Half of the variance is that of single forwards and backwards, half that of a rank throughout the step: the noise of shared
  // machines is about as strong on all time scales, so that means over longer times vary as much as those over shorter ones.
  SimulationInput jittered(SimulationInput input) {
    const std::vector<StageTime> steady = std::exchange(input.times, {});
    std::normal_distribution<double> normal;
    const auto draw = [&] { return sign_ * jitter_ * std::sqrt(0.5) * normal(random_); };
    std::vector<double> of_rank(static_cast<size_t>(plan_.num_ranks));
    for (double& drawn : of_rank) drawn = draw();
    for (size_t s = 0; s < steady.size(); ++s) {
      const StageTime& time = steady[s];
      const auto factor = [&] { return std::max(0.2, 1 + of_rank[static_cast<size_t>(plan_.stages[s].rank)] + draw()); };
      auto& of_stage = input.microbatch_times.emplace_back(static_cast<size_t>(schedule_.num_microbatches));
      for (StageTime& drawn : of_stage) {
        const double forward = factor(), backward = factor();
        drawn = {time.forward_us * forward, time.backward_us * backward, time.weight_us * backward};
      }
    }
    return input;
  }

  static constexpr size_t kMostActions = 100'000;  // simulated, so that planning stays quick

  const Schedule& schedule_;
  const Plan& plan_;
  const std::vector<SimulationInput> steady_;
  const double jitter_;
  double sign_ = 1;
  std::mt19937_64 random_;  // from the same seed in all predictions
};

/// The times of each replica, on ranks as slow as that.
std::vector<SimulationInput> times_of_replicas(const SimulationInput& times, const Plan& plan, const PartitionOptions& options,
                                               const std::vector<std::vector<double>>& slowness) {
  std::vector<SimulationInput> replicas(static_cast<size_t>(std::max(1, options.num_replicas)), times);
  for (size_t r = 0; r < slowness.size(); ++r) {
    for (size_t s = 0; s < plan.stages.size(); ++s) {
      const int rank = plan.stages[s].rank;
      const double factor = slowness[r].at(static_cast<size_t>(rank)) * options.speed_of(rank);  // the plan has divided by it
      StageTime& time = replicas.at(r).times[s];
      time = {time.forward_us * factor, time.backward_us * factor, time.weight_us * factor};
    }
  }
  return replicas;
}

}  // namespace

StepPrediction predict_step(const Graph& graph, const Plan& plan, const PartitionOptions& options,
                            const std::vector<std::vector<double>>& slowness) {
  const StageGraph stages = stage_graph(plan, graph);
  const Schedule schedule = generate(plan.schedule, stages, options.num_microbatches);
  const SimulationInput times = predicted_times(graph, plan, options.device);
  const Simulation simulation = simulate(schedule, times);
  const double jitter = options.measured == nullptr ? 0 : options.measured->jitter_of(graph);
  const bool is_steady = jitter == 0 && slowness.empty();
  const double us = is_steady ? simulation.makespan_us
                              : JitteredSteps(schedule, plan, times_of_replicas(times, plan, options, slowness), jitter).mean_us();
  const double bodies_us = options.device.body_us * static_cast<double>(graph.nodes.size()) * options.num_microbatches;
  return {bodies_us + us, simulation.bubble};
}

}  // namespace smp::partitioner
