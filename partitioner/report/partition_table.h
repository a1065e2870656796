// A plan for people, the table that rank 0 prints at the start, and for programs that read logs.
#pragma once

#include <string>

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// One line per stage, then the distance to the lower bound and the predicted step: its time, and the part of it in which
/// ranks wait or talk instead of computing. The other times are per microbatch; memory is the predicted peak of the rank.
///
///   stage | rank | modules              | parameters | forward + backward |   sends |   memory
///       0 |    0 | embed .. layers.1    |     4.10 M |           812.4 us | 10.0 us | 61.2 MiB
///   slowest stage 822.4 us, lower bound 790.0 us, gap 4.1 %; predicted step 7.4 ms, bubble 11.3 %
std::string partition_table(const Graph& graph, const Plan& plan);

/// The same as JSON, one line: {"num_ranks", "stages": [{"rank", "modules", "parameters", and the fields of StageCost}],
/// "slowest_stage_us", "lower_bound_us", "gap_percent", "predicted_step_us", "predicted_bubble", "predicted_peak_bytes"}. To
/// read, not to restore: that is plan_io.h.
std::string partition_table_json(const Graph& graph, const Plan& plan);

/// (slowest / lower bound - 1) in percent, never below 0; 0 when there is no work.
double gap_percent(const Plan& plan);

/// Elements of the stage's parameters; buffers do not count.
int64_t num_parameters(const Graph& graph, const StagePlan& stage);

}  // namespace smp::partitioner
