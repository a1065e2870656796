// Performs a schedule in the abstract.
#include "partitioner/schedule/walk.h"

#include <unordered_map>

namespace smp::partitioner {

std::vector<Position> walk(const Schedule& schedule, const Perform& perform) {
  std::vector<int> next(schedule.columns.size(), 0);
  std::unordered_map<Action, Position, ActionHash> sent;
  std::unordered_map<Action, int, ActionHash> waiting;  // send that is missing -> rank
  std::vector<int> runnable;
  for (int rank = static_cast<int>(next.size()); rank-- > 0;) runnable.push_back(rank);
  while (!runnable.empty()) {
    const int rank = runnable.back();
    runnable.pop_back();
    const auto& column = schedule.columns[rank];
    for (; next[rank] < static_cast<int>(column.size()); ++next[rank]) {
      const Action& action = column[next[rank]];
      const Position at{rank, next[rank]};
      if (action.is_receive()) {
        const auto message = sent.find(counterpart(action));
        if (message == sent.end()) {
          waiting[counterpart(action)] = rank;
          break;
        }
        perform(at, message->second);
        sent.erase(message);
        continue;
      }
      perform(at, at);
      if (!action.is_send()) continue;
      sent.emplace(action, at);
      if (const auto found = waiting.find(action); found != waiting.end()) {
        runnable.push_back(found->second);
        waiting.erase(found);
      }
    }
  }
  std::vector<Position> stuck;
  for (int rank = 0; rank < static_cast<int>(next.size()); ++rank) {
    if (next[rank] < static_cast<int>(schedule.columns[rank].size())) {
      stuck.push_back({rank, next[rank]});
    }
  }
  return stuck;
}

}  // namespace smp::partitioner
