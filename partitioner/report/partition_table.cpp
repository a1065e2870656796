// Text form of a plan.
#include "partitioner/report/partition_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "partitioner/report/text_table.h"

namespace smp::partitioner {
namespace {

std::string count_text(int64_t count) {
  if (count < 1000) return std::to_string(count);
  const auto number = static_cast<double>(count);
  if (number < 1e6) return with_unit(number / 1e3, " K");
  return number < 1e9 ? with_unit(number / 1e6, " M") : with_unit(number / 1e9, " G");
}

std::string bytes_text(int64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " B";
  const double kibibytes = static_cast<double>(bytes) / 1024;
  if (kibibytes < 1024) return with_unit(kibibytes, " KiB");
  const double mebibytes = kibibytes / 1024;
  return mebibytes < 1024 ? with_unit(mebibytes, " MiB") : with_unit(mebibytes / 1024, " GiB");
}

/// A line for each stage that computes something again.
std::string recomputed(const Plan& plan) {
  std::string text;
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    const std::vector<NodeId>& nodes = plan.stages[s].nodes;
    const auto count = std::count_if(nodes.begin(), nodes.end(), [&](NodeId n) {
      return plan.recomputation.region_of(n) != kNoRegion && !plan.recomputation.keeps(n);
    });
    if (count == 0) continue;
    text += "stage " + std::to_string(s) + " keeps nothing of " + std::to_string(count) + " of " +
            std::to_string(nodes.size()) + " operators until their backward, for which it computes " +
            time_text(plan.stages[s].cost.again_us) + " again\n";
  }
  return text;
}

/// "first .. last" module of a stage, "-" for none.
std::string compact_modules(const StagePlan& stage) {
  if (stage.modules.empty()) return "-";
  if (stage.modules.size() == 1) return stage.modules.front();
  return stage.modules.front() + " .. " + stage.modules.back();
}

}  // namespace

int64_t num_parameters(const Graph& graph, const StagePlan& stage) {
  int64_t elements = 0;
  for (ValueId id : stage.parameters) {
    const Value& value = graph.values[id];
    if (value.kind == ValueKind::kParameter) elements += value.spec.num_elements();
  }
  return elements;
}

double gap_percent(const Plan& plan) {
  constexpr double kRounding = 0.05;  // less is printed as 0.0
  if (plan.lower_bound_us <= 0) return 0;
  const double gap = 100 * (plan.slowest_stage_us / plan.lower_bound_us - 1);
  TORCH_INTERNAL_ASSERT(gap > -kRounding, "the slowest stage takes ", plan.slowest_stage_us,
                        " us, less than its lower bound of ", plan.lower_bound_us, " us");
  return std::max(0.0, gap);  // sums in another order differ in their last bits
}

std::string partition_table(const Graph& graph, const Plan& plan) {
  constexpr size_t kModulesColumn = 2;
  std::vector<Row> rows{{"stage", "rank", "modules", "parameters", "forward + backward", "sends", "memory"}};
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    const StagePlan& stage = plan.stages[s];
    rows.push_back({std::to_string(s), std::to_string(stage.rank), compact_modules(stage),
                    count_text(num_parameters(graph, stage)), time_text(stage.cost.forward_us + stage.cost.backward_us),
                    time_text(stage.cost.send_us), bytes_text(plan.predicted_peak_bytes[stage.rank])});
  }
  char summary[200];
  std::snprintf(summary, sizeof summary,
                "slowest stage %s, lower bound %s, gap %.1f %%; predicted step %s, bubble %.1f %%\n",
                time_text(plan.slowest_stage_us).c_str(), time_text(plan.lower_bound_us).c_str(), gap_percent(plan),
                time_text(plan.predicted_step_us).c_str(), 100 * plan.predicted_bubble);
  return aligned(rows, kModulesColumn) + summary + recomputed(plan);
}

}  // namespace smp::partitioner
