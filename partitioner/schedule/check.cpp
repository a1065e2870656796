// Proves a schedule sound before anything runs: contents first, then orders, then an abstract run.
#include "partitioner/schedule/check.h"

#include <c10/util/Exception.h>

#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "partitioner/schedule/dependencies.h"
#include "partitioner/schedule/in_flight.h"
#include "partitioner/schedule/microbatch_graphs.h"
#include "partitioner/schedule/walk.h"

namespace smp::partitioner {
namespace {

/// Source stage and rank, target stage and rank, forward.
using Channel = std::tuple<int, int, int, int, bool>;

class Checker {
 public:
  Checker(const Schedule& schedule, const MicrobatchGraphs& graphs)
      : schedule_(schedule), graphs_(graphs), in_flight_(graphs.num_ranks()) {}

  void run() {
    check_sizes();
    check_contents();
    check_microbatch_order();
    check_channel_order();
    check_run();
  }

 private:
  const Action& action_at(Position at) const { return schedule_.columns[at.rank][at.index]; }

  std::string describe(Position at) const {
    return "rank " + std::to_string(at.rank) + ", position " + std::to_string(at.index) + " (" + to_string(action_at(at)) +
           ")";
  }

  template <typename Visitor>
  void for_each_position(const Visitor& visit) const {
    for (int rank = 0; rank < schedule_.num_ranks; ++rank) {
      for (int index = 0; index < static_cast<int>(schedule_.columns[rank].size()); ++index) {
        visit(Position{rank, index});
      }
    }
  }

  void check_sizes() const {
    TORCH_CHECK_VALUE(
        schedule_.num_ranks == graphs_.num_ranks() && static_cast<int>(schedule_.columns.size()) == graphs_.num_ranks(),
        "schedule check: expected one column for each of ", graphs_.num_ranks(),
        " ranks, got num_ranks=", schedule_.num_ranks, " and ", schedule_.columns.size(), " columns.");
    TORCH_CHECK_VALUE(schedule_.num_microbatches == graphs_.num_microbatches(), "schedule check: expected ",
                      graphs_.num_microbatches(), " microbatches, got ", schedule_.num_microbatches, ".");
    TORCH_CHECK_VALUE(static_cast<int>(schedule_.in_flight_limits.size()) == graphs_.most_stages(),
                      "schedule check: expected an in-flight limit for each of ", graphs_.most_stages(), " stages, got ",
                      schedule_.in_flight_limits.size(), ".");
  }

  void check_contents() {
    const std::vector<Action> listed = demanded_actions(graphs_);
    const std::unordered_set<Action, ActionHash> demanded(listed.begin(), listed.end());
    for_each_position([&](Position at) {
      const Action& action = action_at(at);
      TORCH_CHECK_VALUE(demanded.contains(action), "schedule check: ", describe(at),
                        ": expected only what the stage graphs demand, got an action that no stage, edge or microbatch of "
                        "theirs demands. Remove it.");
      const int rank = graphs_.rank_of(action.stage, action.microbatch);
      TORCH_CHECK_VALUE(at.rank == rank, "schedule check: ", describe(at), ": expected on rank ", rank,
                        ", which holds the stage, got rank ", at.rank, ". Move it.");
      const auto [first, is_new] = position_of_.emplace(action, at);
      TORCH_CHECK_VALUE(is_new, "schedule check: ", describe(at), ": expected once, got it at ", "position ",
                        first->second.index, " already. Remove one.");
    });
    if (position_of_.size() != demanded.size()) report_missing(listed);
  }

  /// Names the first gap; of a transfer with one end, the other end too.
  void report_missing(const std::vector<Action>& demanded) const {
    for (const Action& action : demanded) {
      if (position_of_.contains(action)) continue;
      const auto other = action.is_compute() ? position_of_.end() : position_of_.find(counterpart(action));
      TORCH_CHECK_VALUE(false, "schedule check: rank ", graphs_.rank_of(action.stage, action.microbatch), ": expected ",
                        to_string(action),
                        other == position_of_.end() ? std::string() : " as the other end of " + describe(other->second),
                        ", got none. Add it.");
    }
  }

  /// By stage within one program; between programs, whose stages may share parameters in any way, by rank. Backwards and
  /// weight gradients both add to parameters.
  void check_microbatch_order() const {
    std::map<std::tuple<ActionKind, int, int>, Position> last;  // by (kind, program, stage)
    std::map<std::tuple<bool, int, int>, Position> highest;     // by (forward, rank, program)
    for_each_position([&](Position at) {
      const Action& action = action_at(at);
      if (!action.is_compute()) return;
      const int program = graphs_.program_of(action.microbatch);
      const auto [before, is_first] = last.try_emplace({action.kind, program, action.stage}, at);
      if (!is_first) expect_ascending(before->second, at);
      before->second = at;
      for (int other = 0; other < graphs_.num_programs(); ++other) {
        const auto found = highest.find({action.is_forward(), at.rank, other});
        if (other != program && found != highest.end()) expect_ascending(found->second, at);
      }
      Position& own = highest.try_emplace({action.is_forward(), at.rank, program}, at).first->second;
      if (action_at(own).microbatch < action.microbatch) own = at;
    });
  }

  void expect_ascending(Position before, Position at) const {
    TORCH_CHECK_VALUE(action_at(before).microbatch < action_at(at).microbatch, "schedule check: ", describe(at),
                      ": expected microbatches in ascending ", "order, got it after ", describe(before), ". Exchange them.");
  }

  Channel channel_of(const Action& transfer) const {
    const auto& [kind, source, m, target] = send_of(transfer);
    return {source, graphs_.rank_of(source, m), target, graphs_.rank_of(target, m), row_of(kind).is_forward};
  }

  void check_channel_order() const {
    std::map<Channel, std::vector<Position>> sends, receives;
    for_each_position([&](Position at) {
      const Action& action = action_at(at);
      if (!action.is_compute()) (action.is_send() ? sends : receives)[channel_of(action)].push_back(at);
    });
    for (const auto& [channel, sent] : sends) {
      const auto& received = receives.at(channel);
      for (size_t i = 0; i < sent.size(); ++i) {
        TORCH_CHECK_VALUE(send_of(action_at(received[i])) == action_at(sent[i]), "schedule check: ", describe(received[i]),
                          ": expected message ", i, " of its channel to be ", describe(sent[i]),
                          ", got another. Receive in the order of the sends.");
      }
    }
  }

  void perform(Position at) {
    const Action& action = action_at(at);
    for_each_dependency(action, graphs_, [&](const Action& needed) {
      const Position before = position_of_.at(needed);
      TORCH_CHECK_VALUE(before.rank != at.rank || before.index < at.index, "schedule check: ", describe(at),
                        ": expected after ", describe(before), ", got before it. Exchange them.");
    });
    if (!in_flight_[at.rank].count(action, graphs_)) return;
    const int held = in_flight_[at.rank].held(graphs_.program_of(action.microbatch), action.stage);
    const int limit = schedule_.in_flight_limits[action.stage];
    TORCH_CHECK_VALUE(held <= limit, "schedule check: ", describe(at), ": expected at most ", limit,
                      " microbatches in flight on stage ", action.stage, ", got ", held,
                      ". Run a backward and its weight gradients before, or raise active_microbatches.");
  }

  void check_run() {
    const std::vector<Position> stuck = walk(schedule_, [this](Position at, Position) { perform(at); });
    std::string report;
    for (const Position& at : stuck) {
      report +=
          (report.empty() ? "" : "; ") + describe(at) + " waits for " + describe(position_of_.at(send_of(action_at(at))));
    }
    TORCH_CHECK_VALUE(stuck.empty(), "schedule check: expected every receive to get its message, ",
                      "got a deadlock: ", report, ". Send before the receives that wait for it.");
  }

  const Schedule& schedule_;
  const MicrobatchGraphs& graphs_;
  std::vector<InFlight> in_flight_;  // by rank
  std::unordered_map<Action, Position, ActionHash> position_of_;
};

}  // namespace

void check(const Schedule& schedule, std::span<const StageGraph* const> graph_of_microbatch) {
  const MicrobatchGraphs graphs(graph_of_microbatch);
  Checker(schedule, graphs).run();
}

void check(const Schedule& schedule, const StageGraph& graph) {
  check(schedule, std::vector<const StageGraph*>(std::max(0, schedule.num_microbatches), &graph));
}

}  // namespace smp::partitioner
