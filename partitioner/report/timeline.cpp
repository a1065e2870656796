// Names, and one step out of a record.
#include "partitioner/report/timeline.h"

#include <algorithm>

namespace smp::partitioner {

PipelineStep pipeline_step(const std::vector<RankTimeline>& ranks, int replica, size_t index) {
  std::vector<const RankTimeline*> pipeline;
  for (const RankTimeline& rank : ranks) {
    if (rank.replica == replica) pipeline.push_back(&rank);
  }
  std::sort(pipeline.begin(), pipeline.end(),
            [](const auto* a, const auto* b) { return a->pipeline_rank < b->pipeline_rank; });
  PipelineStep step;
  for (const RankTimeline* rank : pipeline) step.push_back(rank->steps.at(index));
  return step;
}

std::string to_string(const Span& span) {
  const std::string microbatch = " " + std::to_string(span.microbatch);
  switch (span.activity) {
    case Activity::kForward:
      return "F" + microbatch;
    case Activity::kBackward:
      return "B" + microbatch;
    case Activity::kSendActivation:
      return "send F" + microbatch;
    case Activity::kReceiveActivation:
      return "receive F" + microbatch;
    case Activity::kSendGradient:
      return "send B" + microbatch;
    case Activity::kReceiveGradient:
      return "receive B" + microbatch;
    case Activity::kBody:
      return "body";
    case Activity::kMessage:
      return "step message";
    case Activity::kCollective:
      return "collective";
    case Activity::kLastSends:
      return "last sends";
    case Activity::kResults:
      return "results";
    case Activity::kRest:
      return "W" + microbatch;
  }
  return "";
}

}  // namespace smp::partitioner
