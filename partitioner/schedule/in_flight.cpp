// What a list of computations holds at most.
#include "partitioner/schedule/in_flight.h"

#include <algorithm>

#include "partitioner/schedule/dependencies.h"

namespace smp::partitioner {

std::vector<int> most_in_flight(const MicrobatchGraphs& graphs, const std::vector<Action>& computations) {
  std::vector<int> now(graphs.most_stages(), 0), most(graphs.most_stages(), 1);
  for (const Action& action : computations) {
    const int stage = action.stage;
    if (!graphs.has_backward(stage, action.microbatch)) continue;
    now[stage] += holds(action.row().makes, Item::kSaved) ? 1 : 0;
    now[stage] -= action.row().frees == Item::kSaved ? 1 : 0;
    most[stage] = std::max(most[stage], now[stage]);
  }
  return most;
}

}  // namespace smp::partitioner
