// JSON form of the partition table.
#include "partitioner/report/partition_table_io.h"

#include <boost/json.hpp>

#include "partitioner/report/partition_table.h"

namespace smp::partitioner {

namespace json = boost::json;

std::string partition_table_json(const Graph& graph, const Plan& plan) {
  json::array stages;
  for (const StagePlan& stage : plan.stages) {
    const StageCost& cost = stage.cost;
    stages.push_back({{"rank", stage.rank},
                      {"modules", json::array(stage.modules.begin(), stage.modules.end())},
                      {"parameters", num_parameters(graph, stage)},
                      {"forward_us", cost.forward_us},
                      {"backward_us", cost.backward_us},
                      {"send_us", cost.send_us},
                      {"parameter_bytes", cost.parameter_bytes},
                      {"gradient_bytes", cost.gradient_bytes},
                      {"optimizer_bytes", cost.optimizer_bytes},
                      {"activation_bytes", cost.activation_bytes},
                      {"workspace_bytes", cost.workspace_bytes},
                      {"message_bytes", cost.message_bytes}});
  }
  const auto& peak = plan.predicted_peak_bytes;
  return json::serialize(json::value{{"num_ranks", plan.num_ranks},
                                     {"stages", std::move(stages)},
                                     {"slowest_stage_us", plan.slowest_stage_us},
                                     {"lower_bound_us", plan.lower_bound_us},
                                     {"gap_percent", gap_percent(plan)},
                                     {"predicted_step_us", plan.predicted_step_us},
                                     {"predicted_bubble", plan.predicted_bubble},
                                     {"predicted_peak_bytes", json::array(peak.begin(), peak.end())}});
}

}  // namespace smp::partitioner
