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
  switch (span.activity) {
    case Activity::kAction: {
      const ActionRow& row = span.action.row();
      const std::string what = span.action.is_compute() ? std::string(1, row.letter) : std::string(row.name);
      return what + " " + std::to_string(span.action.microbatch);
    }
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
  }
  return "";
}

}  // namespace smp::partitioner
