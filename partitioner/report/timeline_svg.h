// One measured step as a picture, under its simulation.
#pragma once

#include <optional>
#include <string>

#include "partitioner/report/idle_time.h"

namespace smp::partitioner {

/// A drawing in SVG 1.1 on one time axis, one row per rank: the schedule simulated with the predicted durations (where
/// there are any) and with the measured ones, without any cost of messages; under them what was measured, with idle time in
/// the colour of its cause, then legend and idle_table. Simulations begin where the first action of the step does.
///
/// `schedule` and `attribution`: those of `step`. `predicted`: of that schedule.
std::string timeline_svg(const PipelineStep& step, const Schedule& schedule, const StepAttribution& attribution,
                         const std::optional<SimulationInput>& predicted);

/// "step 7 (training): measured 12.3 ms, bubble 21.2 %; predicted 10.1 ms, bubble 18.0 %": its first line.
std::string timeline_title(const PipelineStep& step, const Schedule& schedule, const StepAttribution& attribution,
                           const std::optional<SimulationInput>& predicted);

}  // namespace smp::partitioner
