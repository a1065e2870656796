// JSON form of the partition table.
#include <boost/json.hpp>

#include "partitioner/report/partition_table.h"

namespace smp::partitioner {

std::string partition_table_json(const Graph& graph, const Plan& plan) {
  namespace json = boost::json;
  json::array stages;
  for (const StagePlan& stage : plan.stages) {
    json::object& fields = stages.emplace_back(json::object()).get_object();
    fields["rank"] = stage.rank;
    fields["modules"] = json::array(stage.modules.begin(), stage.modules.end());
    fields["parameters"] = num_parameters(graph, stage);
    for (const auto& [name, us] : kStageTimes) fields[name] = stage.cost.*us;
    for (const auto& [name, bytes] : kStageBytes) fields[name] = stage.cost.*bytes;
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
