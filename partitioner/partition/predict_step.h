// The predicted time of a step: its schedule, made and performed on paper.
#pragma once

#include <vector>

#include "partitioner/partition/partition.h"
#include "partitioner/plan/plan.h"
#include "partitioner/schedule/simulate.h"

namespace smp::partitioner {

struct StepPrediction {
  double us = 0;      // from the first body to the last backward of the slowest replica
  double bubble = 0;  // the part of the schedule, on mean times, in which a rank does not compute, mean over ranks
};

/// The times of `plan`, made for `graph`, for one microbatch. A message keeps both its ranks busy.
SimulationInput predicted_times(const Graph& graph, const Plan& plan, const DeviceModel& device);

/// The step of `plan`, made for `graph`, under its schedule, with the replicas and device of `options`. A message
/// keeps both its ranks busy.
///
/// Where a machine's jitter was measured, it is the mean over some steps whose forwards and backwards each take a little more
/// or less, the same ones at every call: whoever is late makes others wait, so a step takes longer than that of mean times.
///
/// `slowness`: by replica and pipeline rank, how many times as long as options.measured says operators take there, whatever
/// options.rank_speed; empty: as the plan says. Plans are not made for it, because it may be another a minute later.
StepPrediction predict_step(const Graph& graph, const Plan& plan, const PartitionOptions& options,
                            const std::vector<std::vector<double>>& slowness = {});

}  // namespace smp::partitioner
