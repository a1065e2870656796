// The predicted time of a step: its schedule, made and performed on paper.
#pragma once

#include "partitioner/plan/partition.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Microseconds from the first forward to the last backward of `plan`, made for `graph`, under the
/// schedule and device of `options`; a send keeps its rank busy.
double predict_step_us(const Graph& graph, const Plan& plan, const PartitionOptions& options);

}  // namespace smp::partitioner
