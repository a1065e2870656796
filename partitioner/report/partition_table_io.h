// A plan for programs that read logs: the partition table as JSON.
#pragma once

#include <string>

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// One line: {"num_ranks", "stages": [{"rank", "modules", "parameters", "forward_us", "backward_us", "send_us",
/// "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "workspace_bytes", "message_bytes"}],
/// "slowest_stage_us", "lower_bound_us", "gap_percent", "predicted_step_us", "predicted_bubble", "predicted_peak_bytes"}. To
/// read, not to restore: that is plan_io.h.
std::string partition_table_json(const Graph& graph, const Plan& plan);

}  // namespace smp::partitioner
