// Steps by table, then by duration.
#include "partitioner/report/typical_step.h"

#include <algorithm>
#include <utility>

#include "partitioner/report/idle_time.h"

namespace smp::partitioner {
namespace {

struct Alike {
  Schedule schedule;
  size_t num_actions = 0;
  std::vector<std::pair<int64_t, size_t>> steps;  // duration, index
};

int64_t duration_ns(const PipelineStep& step) {
  int64_t end_ns = step.front().end_ns;
  for (const RankStep& rank : step) end_ns = std::max(end_ns, rank.end_ns);
  return end_ns - step.front().start_ns;
}

}  // namespace

std::optional<size_t> typical_step(const std::vector<RankTimeline>& ranks, int replica) {
  std::vector<Alike> all;
  const auto first = std::find_if(ranks.begin(), ranks.end(), [&](const auto& rank) { return rank.replica == replica; });
  for (size_t s = 0; first != ranks.end() && s < first->steps.size(); ++s) {
    const PipelineStep step = pipeline_step(ranks, replica, s);
    const std::optional<Schedule> schedule = performed_schedule(step);
    if (!schedule) continue;
    auto alike = std::find_if(all.begin(), all.end(), [&](const Alike& known) { return known.schedule == *schedule; });
    if (alike == all.end()) {
      alike = all.insert(all.end(), Alike{.schedule = *schedule, .num_actions = 0, .steps = {}});
      for (const auto& column : schedule->columns) alike->num_actions += column.size();
    }
    alike->steps.emplace_back(duration_ns(step), s);
  }
  if (all.empty()) return std::nullopt;
  Alike& most = *std::max_element(all.begin(), all.end(), [](const Alike& a, const Alike& b) {
    return std::pair(a.steps.size(), a.num_actions) < std::pair(b.steps.size(), b.num_actions);
  });
  const auto median = most.steps.begin() + static_cast<ptrdiff_t>((most.steps.size() - 1) / 2);
  std::nth_element(most.steps.begin(), median, most.steps.end());
  return median->second;
}

}  // namespace smp::partitioner
