// Puts columns into one order that can be performed.
#include "partitioner/schedule/given.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

#include "partitioner/plan/derive.h"
#include "partitioner/schedule/dependencies.h"
#include "partitioner/schedule/in_flight.h"
#include "partitioner/schedule/transfers.h"

namespace smp::partitioner {
namespace {

void check_computation(const Action& action, int rank, const MicrobatchGraphs& graphs) {
  const int m = action.microbatch;
  const bool exists = action.is_compute() && m >= 0 && m < graphs.num_microbatches() && action.stage >= 0 &&
                      action.stage < graphs.num_stages(m) && action.peer == -1;
  TORCH_CHECK_VALUE(exists && graphs.rank_of(action.stage, m) == rank, "schedule: expected computations of rank ", rank,
                    "'s own stages in its column, got ", exists ? to_string(action) : "none of this plan", ".", kPlanAgain);
}

/// All of them, by the time at which they can start if each takes as long as any other, with what follows it at once.
std::vector<Action> in_one_order(const std::vector<std::vector<Action>>& columns, const MicrobatchGraphs& graphs) {
  std::vector<Action> order;
  std::unordered_set<Action, ActionHash> done;
  std::vector<size_t> next(columns.size(), 0);
  const auto is_ready = [&](const Action& action) {
    bool ready = true;
    for_each_computation_before(action, graphs, [&](const Action& needed) { ready = ready && done.contains(needed); });
    return ready;
  };
  for (bool goes_on = true; goes_on;) {
    const size_t num_before = order.size();
    for (size_t rank = 0; rank < columns.size(); ++rank) {
      const std::vector<Action>& column = columns[rank];
      if (next[rank] == column.size() || !is_ready(column[next[rank]])) continue;
      do order.push_back(column[next[rank]++]);
      while (next[rank] < column.size() && follows_at_once(column[next[rank]], order.back()));
    }
    done.insert(order.begin() + static_cast<std::ptrdiff_t>(num_before), order.end());
    goes_on = order.size() > num_before;
  }
  for (size_t rank = 0; rank < columns.size(); ++rank) {
    TORCH_CHECK_VALUE(next[rank] == columns[rank].size(), "schedule: expected columns that end, got rank ", rank,
                      " waiting for ever before ", to_string(columns[rank][next[rank]]), ".", kPlanAgain);
  }
  return order;
}

/// By stage, at least 1: microbatches whose saved tensors it holds at once, with the computations of one program in this
/// order.
std::vector<int> most_in_flight(const MicrobatchGraphs& graphs, const std::vector<Action>& computations) {
  InFlight in_flight;  // a stage lies on one rank, so that it can be that of all
  std::vector<int> most(graphs.most_stages(), 1);
  for (const Action& action : computations) {
    in_flight.count(action, graphs);
    most[action.stage] = std::max(most[action.stage], in_flight.held(graphs.program_of(action.microbatch), action.stage));
  }
  return most;
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
                    graphs.num_ranks(), " ranks, got ", columns.size(), ".", kPlanAgain);
  for (size_t rank = 0; rank < columns.size(); ++rank) {
    for (const Action& action : columns[rank]) check_computation(action, static_cast<int>(rank), graphs);
  }
  return schedule_of(columns, graphs);
}

Schedule schedule_of(const std::vector<std::vector<Action>>& columns, const MicrobatchGraphs& graphs) {
  const std::vector<Action> computations = in_one_order(columns, graphs);
  Schedule schedule;
  schedule.num_ranks = graphs.num_ranks();
  schedule.num_microbatches = graphs.num_microbatches();
  schedule.in_flight_limits = most_in_flight(graphs, computations);
  schedule.columns = insert_transfers(computations, graphs);
  return schedule;
}

}  // namespace smp::partitioner
