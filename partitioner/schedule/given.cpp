// Puts given columns into one order and proves them.
#include "partitioner/schedule/given.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

#include "partitioner/plan/plan.h"
#include "partitioner/schedule/dependencies.h"
#include "partitioner/schedule/in_flight.h"
#include "partitioner/schedule/microbatch_graphs.h"
#include "partitioner/schedule/transfers.h"

namespace smp::partitioner {
namespace {

void check_computation(const Action& action, int rank, const MicrobatchGraphs& graphs) {
  const int m = action.microbatch;
  const bool exists = action.is_compute() && m >= 0 && m < graphs.num_microbatches() && action.stage >= 0 &&
                      action.stage < graphs.num_stages(m) && action.peer == -1;
  const bool is_here = exists && graphs.rank_of(action.stage, m) == rank &&
                       (action.kind == ActionKind::kForward || graphs.has_backward(action.stage, m));
  TORCH_CHECK_VALUE(is_here, "schedule: expected computations of rank ", rank, "'s own stages in its column, got ",
                    exists ? to_string(action) : "none of this plan", ".");
}

/// What makes what a transfer moves; `needed` itself where it is a computation.
Action maker(const Action& needed) {
  if (needed.is_compute()) return needed;
  return {needed.is_forward() ? ActionKind::kForward : ActionKind::kBackward, needed.peer, needed.microbatch};
}

/// All of them, in an order in which they can be performed.
std::vector<Action> in_one_order(const std::vector<std::vector<Action>>& columns, const MicrobatchGraphs& graphs) {
  std::vector<Action> order;
  std::unordered_set<Action, ActionHash> done;
  std::vector<size_t> next(columns.size(), 0);
  const auto is_ready = [&](const Action& action) {
    bool ready = true;
    for_each_dependency(action, graphs, [&](const Action& needed) {
      const Action made = maker(needed);
      ready = ready && (made.stage == kInputStage || done.contains(made));
    });
    return ready;
  };
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (size_t rank = 0; rank < columns.size(); ++rank) {
      for (; next[rank] < columns[rank].size() && is_ready(columns[rank][next[rank]]); ++next[rank], goes_on = true) {
        const Action& action = columns[rank][next[rank]];
        TORCH_CHECK_VALUE(done.insert(action).second, "schedule: expected each computation once, got ", to_string(action),
                          " twice.");
        order.push_back(action);
      }
    }
  }
  for (size_t rank = 0; rank < columns.size(); ++rank) {
    TORCH_CHECK_VALUE(next[rank] == columns[rank].size(), "schedule: expected columns that end, got rank ", rank,
                      " waiting for ever before ", to_string(columns[rank][next[rank]]), ".");
  }
  return order;
}

int num_microbatches(const std::vector<std::vector<Action>>& columns) {
  int most = -1;
  for (const auto& column : columns) {
    for (const Action& action : column) most = std::max(most, action.microbatch);
  }
  return most + 1;
}

}  // namespace

std::optional<Schedule> given_schedule(const std::vector<std::vector<Action>>& columns,
                                       std::span<const StageGraph* const> graph_of_microbatch) {
  const MicrobatchGraphs graphs(graph_of_microbatch);
  if (graphs.num_programs() != 1 || num_microbatches(columns) != graphs.num_microbatches()) return std::nullopt;
  TORCH_CHECK_VALUE(static_cast<int>(columns.size()) == graphs.num_ranks(), "schedule: expected a column for each of ",
                    graphs.num_ranks(), " ranks, got ", columns.size(), ".");
  for (size_t rank = 0; rank < columns.size(); ++rank) {
    for (const Action& action : columns[rank]) check_computation(action, static_cast<int>(rank), graphs);
  }
  const std::vector<Action> computations = in_one_order(columns, graphs);
  const std::unordered_set<Action, ActionHash> there(computations.begin(), computations.end());
  for (const Action& demanded : demanded_actions(graphs)) {
    TORCH_CHECK_VALUE(!demanded.is_compute() || there.contains(demanded),
                      "schedule: expected each computation once, got no ", to_string(demanded), ".");
  }
  Schedule schedule;
  schedule.num_ranks = graphs.num_ranks();
  schedule.num_microbatches = graphs.num_microbatches();
  schedule.in_flight_limits = most_in_flight(graphs, computations);
  schedule.columns = insert_transfers(computations, graphs);
  return schedule;
}

}  // namespace smp::partitioner
