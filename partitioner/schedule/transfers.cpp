// Puts sends and receives around computations.
#include "partitioner/schedule/transfers.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "partitioner/schedule/dependencies.h"

namespace smp::partitioner {
namespace {

constexpr int kLeaderRank = 0;  // holds the step inputs

/// A send of step inputs, due before the leader's first computation whose position is not below
/// `due`.
struct InputSend {
  int due = 0;  // position in the order of all computations
  Action action;
};

/// Where only a later microbatch visits the leader, its send would overtake one of the same
/// channel: the earlier one leaves with it. `sends` are in the order of their consumers.
void keep_channel_order(const MicrobatchGraphs& graphs, std::vector<InputSend>& sends) {
  std::map<std::pair<int, int>, int> next_due;  // by target stage and its rank
  for (auto send = sends.rbegin(); send != sends.rend(); ++send) {
    const int target = send->action.peer;
    const int rank = graphs.rank_of(target, send->action.microbatch);
    const auto [next, is_last] = next_due.try_emplace({target, rank}, send->due);
    next->second = send->due = std::min(send->due, next->second);
  }
}

std::vector<InputSend> input_sends(std::span<const Action> computations, const MicrobatchGraphs& graphs) {
  std::vector<int> leader_forward(graphs.num_microbatches(), std::numeric_limits<int>::max());
  for (int i = 0; i < static_cast<int>(computations.size()); ++i) {
    const Action& action = computations[i];
    if (!action.is_forward() || graphs.rank_of(action.stage, action.microbatch) != kLeaderRank) continue;
    leader_forward[action.microbatch] = std::min(leader_forward[action.microbatch], i);
  }
  std::vector<InputSend> sends;
  for (int i = 0; i < static_cast<int>(computations.size()); ++i) {
    for_each_dependency(computations[i], graphs, [&](const Action& needed) {
      if (!needed.is_receive() || needed.peer != kInputStage) return;
      sends.push_back({std::min(leader_forward[needed.microbatch], i), send_of(needed)});
    });
  }
  keep_channel_order(graphs, sends);
  std::stable_sort(sends.begin(), sends.end(), [](const InputSend& a, const InputSend& b) { return a.due < b.due; });
  return sends;
}

void append_with_transfers(const Action& action, const MicrobatchGraphs& graphs, std::vector<Action>& column) {
  for_each_dependency(action, graphs, [&](const Action& needed) {
    if (needed.is_receive()) column.push_back(needed);
  });
  column.push_back(action);
  for_each_send_of(action, graphs, [&](const Action& send) { column.push_back(send); });
}

}  // namespace

std::vector<std::vector<Action>> insert_transfers(std::span<const Action> computations, const MicrobatchGraphs& graphs) {
  std::vector<std::vector<Action>> columns(graphs.num_ranks());
  const std::vector<InputSend> sends = input_sends(computations, graphs);
  auto next_send = sends.begin();
  for (int i = 0; i < static_cast<int>(computations.size()); ++i) {
    const int rank = graphs.rank_of(computations[i].stage, computations[i].microbatch);
    if (rank == kLeaderRank) {
      for (; next_send != sends.end() && next_send->due <= i; ++next_send) {
        columns[kLeaderRank].push_back(next_send->action);
      }
    }
    append_with_transfers(computations[i], graphs, columns[rank]);
  }
  for (; next_send != sends.end(); ++next_send) columns[kLeaderRank].push_back(next_send->action);
  return columns;
}

}  // namespace smp::partitioner
