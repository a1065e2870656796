// The predicted time of a step: its schedule, made and performed on paper.
#pragma once

#include "partitioner/plan/options.h"
#include "partitioner/plan/plan.h"
#include "partitioner/schedule/simulate.h"

namespace smp::partitioner {

struct StepPrediction {
  double us = 0;      // from the first body to the last backward
  double bubble = 0;  // the part of the schedule in which a rank does not compute, mean over ranks
};

/// The times of `plan`, made for `graph`, for one microbatch. A message keeps both its ranks busy.
SimulationInput predicted_times(const Graph& graph, const Plan& plan, const DeviceModel& device);

/// The step of `plan`, made for `graph`, under its schedule, on the device of `options`. A message keeps both its ranks
/// busy.
StepPrediction predict_step(const Graph& graph, const Plan& plan, const PartitionOptions& options);

}  // namespace smp::partitioner
