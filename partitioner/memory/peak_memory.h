// The most memory that each rank holds at once in a step, by the terms of which it is made.
#pragma once

#include "partitioner/plan/options.h"
#include "partitioner/plan/plan.h"
#include "partitioner/schedule/schedule.h"

namespace smp::partitioner {

/// Fills in activation_bytes, workspace_bytes and message_bytes of every stage, and
/// predicted_peak_bytes. Nodes, parameters, transfers and the other bytes of `plan` must be there; `schedule` is its table.
///
/// The peak of a rank is the largest of these moments, each with its parameters, buffers, constants
/// and optimizer state, with message buffers, and with the step's arguments:
///
/// - the forwards and backwards in the order of the rank's column (rank_memory.h); the first
///   backward of a stage makes the gradients of its parameters, and results stay; from the last
///   backward on, with replicas, a bucket of gradients is under way,
/// - the exchange of results, which leaves all of them on every rank,
/// - the end, when gradients of shared parameters are added up, gradients are averaged over
///   replicas and the optimizer runs.
///
/// Expects that gradients are undefined when a step begins, as after zero_grad(). What the caller
/// holds beside the step's arguments is not counted, nor is what libraries take for themselves.
void add_memory(const Graph& graph, const Schedule& schedule, const DeviceModel& device, const RuntimeBehaviour& behaviour,
                Plan& plan);

}  // namespace smp::partitioner
