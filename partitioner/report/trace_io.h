// The record of a job in the JSON that chrome://tracing and ui.perfetto.dev read.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "partitioner/report/idle_time.h"

namespace smp::partitioner {

/// Writes the trace in pieces, one event each: {"displayTimeUnit", "traceEvents": [...]}.
///
/// pid is the replica, tid the pipeline rank; ts and dur are microseconds since the first recorded step began. Complete
/// events ("X"), by category:
/// - "step": "step 7", from the call of the step function to its return;
/// - "action": "F 3", "send B 3", ...; args: step, stage, microbatch, and of transfers peer, the stage at the other end;
/// - "work": what a rank does beside its table ("body", "results", ...);
/// - "idle": "dependency", "imbalance", "communication", "host" (idle_time.h), where the step has performed a table.
/// A message is an arrow ("s", "f") from its send to its receive.
///
/// Format: Trace Event Format, Google 2016.
void write_trace(const std::vector<RankTimeline>& ranks, const std::function<void(std::string_view)>& write);

}  // namespace smp::partitioner
