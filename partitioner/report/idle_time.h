// Why ranks did not compute: every instant of a measured step, attributed to one cause.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "partitioner/report/timeline.h"
#include "partitioner/schedule/schedule.h"
#include "partitioner/schedule/simulate.h"

namespace smp::partitioner {

/// What an instant of a rank went to. All but kCompute is idle time.
///
/// The window of a step lasts from the leader's call of the step function until the last rank of the pipeline returns from
/// it. At an instant of it a rank
///
/// - computes within a forward or a backward;
/// - communicates while it sends, takes part in a collective, or waits for a message whose sending has begun;
/// - waits for another rank while it receives a message whose sending has not begun, exchanges results that not all ranks
///   have yet, or has nothing left to do in the step. The cause is then that of the awaited rank at the same instant: its
///   host work, its communication, or what it waits for in turn. Where that rank computes, the cause is dependency or
///   imbalance;
/// - is the host's otherwise: splitting, bodies, planning, the step's message to the followers, bookkeeping between
///   actions, and the program before its call.
///
/// Dependency is told from imbalance by the same table with perfectly balanced ranks: each takes an equal part of the
/// measured time of all forwards, in equal forwards, likewise for backwards and weight gradients, and messages take no time.
/// As long as a wait lasts there, as much of the measured wait is dependency; what it lasts longer is imbalance.
enum class Cause : uint8_t { kCompute, kDependency, kImbalance, kCommunication, kHost };
inline constexpr size_t kNumCauses = 5;

/// "compute", "dependency", "imbalance", "communication", "host".
const char* name_of(Cause cause);

struct CausedTime {
  Cause cause = Cause::kHost;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  bool operator==(const CausedTime&) const = default;
};

struct StepAttribution {
  int64_t start_ns = 0, end_ns = 0;                          // the window
  std::vector<std::vector<CausedTime>> ranks;                // each fills the window without gap or overlap
  std::vector<std::array<int64_t, kNumCauses>> ns_of_cause;  // by rank; adds up to end_ns - start_ns
  int64_t num_ns() const { return end_ns - start_ns; }
  /// The part of the window in which a rank does not compute, mean over ranks.
  double bubble() const;
};

/// The table that a step has performed. nullopt where it is none: an action that ran twice (bodies that read values may
/// make that necessary), a message without an end, a step without actions.
std::optional<Schedule> performed_schedule(const PipelineStep& step);

/// The measured durations of a step's computations, by stage and microbatch, in microseconds; no transfers.
SimulationInput measured_times(const PipelineStep& step, const Schedule& schedule);

/// `schedule`: performed_schedule(step). Clocks may be wrong by as much as a message takes; time is lost nowhere.
StepAttribution attribute(const PipelineStep& step, const Schedule& schedule);

/// One line per rank and a total, in percent of the window and in time:
///
///   rank |         compute |     dependency | imbalance | communication |           host
///      0 | 61.2 % (7.1 ms) | 20.1 % (2.3 ms) | ...
std::string idle_table(const StepAttribution& attribution);

}  // namespace smp::partitioner
