// The predicted time of a step: its schedule, performed on paper, and the averaging over replicas.
#pragma once

#include "partitioner/plan/options.h"
#include "partitioner/plan/plan.h"
#include "partitioner/schedule/simulate.h"

namespace smp::partitioner {

/// The times of `plan`, made for `graph`, for one microbatch. A message keeps both its ranks busy.
SimulationInput predicted_times(const Graph& graph, const Plan& plan, const DeviceModel& device);

/// Fills in predicted_step_us, from the first body to the last backward, and predicted_bubble. `schedule`: of `plan`, made
/// for `graph`.
void add_prediction(const Graph& graph, const Schedule& schedule, const DeviceModel& device, Plan& plan);

/// Time to average `bytes` of gradients over `replicas`, one ring for each bucket: each rank sends
/// and receives 2 (R - 1) / R of them. (Patarasuk & Yuan, JPDC 2009)
double averaging_us(const DeviceModel& device, int64_t bytes, int replicas, int64_t bucket_bytes);
/// The same for the rank of `plan` with the most gradients, as measured where it was.
double averaging_us(const Plan& plan, int replicas, const Machine& machine, const RuntimeBehaviour& behaviour);

}  // namespace smp::partitioner
