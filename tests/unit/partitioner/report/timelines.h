// Literal steps of a pipeline, for tests of reports.
#pragma once

#include "partitioner/report/timeline.h"

namespace smp::partitioner::testing {

using enum Activity;
using enum ActionKind;

inline Span span(Activity activity, int64_t start_ns, int64_t end_ns) {
  return {.activity = activity, .start_ns = start_ns, .end_ns = end_ns};
}
inline Span span(ActionKind kind, int stage, int microbatch, int peer, int64_t start_ns, int64_t end_ns) {
  return {kAction, {kind, stage, microbatch, peer}, start_ns, end_ns};
}

/// One microbatch on two ranks, in nanoseconds. Both compute all the time that the other one waits for them, but for the
/// messages, the leader's body until 10, and `late_ns` that rank 1's forward takes longer than rank 0's 10.
inline PipelineStep two_ranks(int64_t late_ns = 0, int64_t pause_ns = 0) {
  const int64_t later_ns = late_ns + pause_ns;
  RankStep first{.number = 7, .trains = true, .start_ns = 0, .end_ns = 77 + later_ns, .spans = {}};
  first.spans = {span(kBody, 0, 10),
                 span(kForward, 0, 0, -1, 10, 20),
                 span(kSendActivation, 0, 0, 1, 20, 21),
                 span(kReceiveGradient, 0, 0, 1, 21, 60 + later_ns),
                 span(kBackward, 0, 0, -1, 60 + later_ns, 75 + later_ns),
                 span(kResults, 75 + later_ns, 76 + later_ns)};
  RankStep second{.number = 7, .trains = true, .start_ns = 2, .end_ns = 78 + later_ns, .spans = {}};
  second.spans = {span(kMessage, 2, 12),
                  span(kReceiveActivation, 1, 0, 0, 12, 25),
                  span(kForward, 1, 0, -1, 25, 35 + late_ns),
                  span(kBackward, 1, 0, -1, 35 + later_ns, 50 + later_ns),
                  span(kSendGradient, 1, 0, 0, 50 + later_ns, 52 + later_ns),
                  span(kResults, 52 + later_ns, 78 + later_ns)};
  return {first, second};
}

/// The same as a record of so many steps, one behind the other.
inline std::vector<RankTimeline> record_of(const std::vector<PipelineStep>& steps, int replica = 0) {
  std::vector<RankTimeline> ranks;
  for (size_t rank = 0; rank < steps.front().size(); ++rank) {
    RankTimeline& made = ranks.emplace_back(RankTimeline{replica, static_cast<int>(rank), {}});
    for (const PipelineStep& step : steps) made.steps.push_back(step[rank]);
  }
  return ranks;
}

}  // namespace smp::partitioner::testing
