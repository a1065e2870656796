// What the ranks of a job did and when: plain data, on one clock. Filled by runtime/executor/timeline.h; read by the reports
// here.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "partitioner/plan/action.h"

namespace smp::partitioner {

inline constexpr double kNsPerUs = 1000;

/// What one rank does for a while.
enum class Activity : uint8_t {
  kAction,      // of the table; a receive: from when the rank comes to it until the message has been taken in
  kBody,        // leader: splits arguments, runs the bodies, plans; up to the message to its followers
  kMessage,     // follower: waits for that message
  kCollective,  // gradients and buffers: with replicas, and with ranks that hold the same weight
  kLastSends,   // waits until all that it sent in the step has left
  kResults,     // exchange of what the bodies return
};
constexpr Activity last_of(Activity) { return Activity::kResults; }
constexpr ActionKind last_of(ActionKind) { return kActionRows.back().kind; }

/// One activity of one rank, in nanoseconds of the common clock.
struct Span {
  Activity activity = Activity::kAction;
  Action action{};  // of kAction only
  int64_t start_ns = 0;
  int64_t end_ns = 0;

  bool is_action() const { return activity == Activity::kAction; }
  bool is_compute() const { return is_action() && action.is_compute(); }
  bool is_receive() const { return is_action() && action.is_receive(); }
  bool operator==(const Span&) const = default;
  // What travels from rank to rank, here and below.
  static auto members(auto& self) {
    return std::tie(self.activity, self.action.kind, self.action.stage, self.action.microbatch, self.action.peer,
                    self.start_ns, self.end_ns);
  }
};

/// One step on one rank: from the call of the step function to its return.
struct RankStep {
  int64_t number = 0;  // steps of the job before it, evaluations included
  bool trains = false;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  std::vector<Span> spans;  // one after the other, within [start_ns, end_ns]
  bool operator==(const RankStep&) const = default;
  static auto members(auto& self) { return std::tie(self.number, self.trains, self.start_ns, self.end_ns, self.spans); }
};

/// One rank's record. All ranks of a job have recorded the same steps.
struct RankTimeline {
  int replica = 0;
  int pipeline_rank = 0;
  std::vector<RankStep> steps;
  bool operator==(const RankTimeline&) const = default;
  static auto members(auto& self) { return std::tie(self.replica, self.pipeline_rank, self.steps); }
};

/// One step of one pipeline, by pipeline rank.
using PipelineStep = std::vector<RankStep>;

/// Step `index` of a replica, by pipeline rank.
PipelineStep pipeline_step(const std::vector<RankTimeline>& ranks, int replica, size_t index);

/// "F 3", "B 3", "W 3", "send F 3", "receive B 3"; the name of the activity for all others: "body", "results".
std::string to_string(const Span& span);

}  // namespace smp::partitioner
