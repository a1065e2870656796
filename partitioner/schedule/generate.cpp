// The table of a step: of a simulation in ticks, or of looped columns.
#include "partitioner/schedule/generate.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "partitioner/schedule/dependencies.h"
#include "partitioner/schedule/given.h"
#include "partitioner/schedule/in_flight.h"
#include "partitioner/schedule/looped.h"
#include "partitioner/schedule/microbatch_graphs.h"
#include "partitioner/schedule/transfers.h"

namespace smp::partitioner {
namespace {

/// Where one stage of one program stands with its forwards or its backwards, which are in microbatch order.
struct Progress {
  int next = 0;  // microbatch of the program, with a backward here
  int done = 0;  // all microbatches of the program below are
};

/// Of forwards and of backwards.
template <class Of>
struct Directions {
  Of forward{}, backward{};
  Of& of(const Action& action) { return action.is_forward() ? forward : backward; }
  const Of& of(const Action& action) const { return action.is_forward() ? forward : backward; }
};

class Generator {
 public:
  Generator(ScheduleKind kind, const MicrobatchGraphs& graphs, const std::vector<int>& limits)
      : kind_(kind),
        graphs_(graphs),
        limits_(limits),
        progress_(graphs.num_programs()),
        stages_of_rank_(graphs.num_ranks()),
        forwards_left_(graphs.num_ranks(), 0),
        left_of_(graphs.num_ranks()),
        in_flight_(graphs.num_ranks()),
        is_woken_(graphs.num_ranks(), false) {
    for (int m = 0; m < graphs.num_microbatches(); ++m) add_microbatch(m);
  }

  /// The computations of all ranks, by start time; an order that respects the dependencies.
  std::vector<Action> run() {
    for (int rank = 0; rank < graphs_.num_ranks(); ++rank) wake(rank);
    for (start_woken(); !running_.empty(); start_woken()) {
      for (const Action& action : std::exchange(running_, {})) complete(action);
    }
    return std::move(started_);
  }

 private:
  struct Visit {
    int program = 0;
    int stage = 0;
  };

  void add_microbatch(int m) {
    const int program = graphs_.program_of(m);
    std::vector<Directions<Progress>>& progress = progress_[program];
    const bool is_first = progress.empty() && graphs_.num_stages(m) > 0;
    if (is_first) progress.resize(graphs_.num_stages(m));
    for (int stage = 0; stage < graphs_.num_stages(m); ++stage) {
      const int rank = graphs_.rank_of(stage, m);
      ++forwards_left_[rank];
      if (is_first) {
        stages_of_rank_[rank].push_back({program, stage});
        progress[stage] = {{next_of(program, -1)}, {next_backward(program, stage, -1)}};
      }
      if (graphs_.num_programs() == 1) continue;
      auto& [forwards, backwards] = left_of_[rank];
      forwards.resize(graphs_.num_microbatches(), 0);
      backwards.resize(graphs_.num_microbatches(), 0);
      ++forwards[m];
      backwards[m] += graphs_.has_backward(stage, m) ? 1 : 0;
    }
  }

  /// The next microbatch of `program` after m.
  int next_of(int program, int m) const {
    do ++m;
    while (m < graphs_.num_microbatches() && graphs_.program_of(m) != program);
    return m;
  }

  int next_backward(int program, int stage, int m) const {
    do m = next_of(program, m);
    while (m < graphs_.num_microbatches() && !graphs_.has_backward(stage, m));
    return m;
  }

  /// Stages of several programs may share parameters in any way. So a rank goes on to a microbatch
  /// of another program only when it is done with those before.
  bool is_turn_of(int m, const std::vector<int>& left) const {
    if (graphs_.num_programs() == 1) return true;
    for (int before = 0; before < m; ++before) {
      if (left[before] > 0 && graphs_.program_of(before) != graphs_.program_of(m)) return false;
    }
    return true;
  }

  bool is_done(const Action& needed) const {
    return progress_[graphs_.program_of(needed.microbatch)][needed.stage].of(needed).done > needed.microbatch;
  }

  bool is_ready(int rank, const Action& action) const {
    const int m = action.microbatch;
    if (m == graphs_.num_microbatches()) return false;
    const bool is_forward = action.is_forward();
    // Without a backward, too: with a limit of 1 no microbatch meets what another needs.
    if (is_forward && in_flight_[rank].held(graphs_.program_of(m), action.stage) >= limits_[action.stage]) return false;
    if (!is_forward && kind_ == ScheduleKind::kSimple && forwards_left_[rank] > 0) return false;
    bool all_done = true;
    for_each_computation_before(action, graphs_, [&](const Action& needed) { all_done = all_done && is_done(needed); });
    return all_done && is_turn_of(m, left_of_[rank].of(action));
  }

  std::optional<Action> best_ready(int rank) const {
    std::optional<Action> best;
    // Smaller is better: backward first, then the lowest microbatch, then the deepest stage.
    const auto order = [](const Action& a) { return std::tuple(a.is_forward(), a.microbatch, -a.stage); };
    const auto offer = [&](const Action& action) {
      if (is_ready(rank, action) && (!best || order(action) < order(*best))) best = action;
    };
    for (const Visit visit : stages_of_rank_[rank]) {
      const auto& [forward, backward] = progress_[visit.program][visit.stage];
      offer({ActionKind::kBackward, visit.stage, backward.next});
      offer({ActionKind::kForward, visit.stage, forward.next});
    }
    return best;
  }

  void start(int rank, const Action& action) {
    const int stage = action.stage, m = action.microbatch;
    const int program = graphs_.program_of(m);
    int& next = progress_[program][stage].of(action).next;
    next = action.is_forward() ? next_of(program, m) : next_backward(program, stage, m);
    if (action.is_forward()) {
      --forwards_left_[rank];
      in_flight_[rank].count(action, graphs_);
    }
    if (graphs_.num_programs() > 1) --left_of_[rank].of(action)[m];
    running_.push_back(action);
    append_with_followers(action, started_);
  }

  void complete(const Action& action) {
    const int program = graphs_.program_of(action.microbatch);
    const int rank = graphs_.rank_of(action.stage, action.microbatch);
    progress_[program][action.stage].of(action).done = action.microbatch + 1;
    if (!action.is_forward()) {
      std::vector<Action> done;
      append_with_followers(action, done);
      for (const Action& each : done) in_flight_[rank].count(each, graphs_);
    }
    wake(rank);
    for_each_send_of(action, graphs_, [&](const Action& send) { wake(graphs_.rank_of(send.peer, send.microbatch)); });
  }

  void wake(int rank) {
    if (is_woken_[rank]) return;
    is_woken_[rank] = true;
    woken_.push_back(rank);
  }

  /// Only ranks that a completion concerns can have new work, so the others are not looked at.
  void start_woken() {
    std::sort(woken_.begin(), woken_.end());
    for (int rank : woken_) {
      is_woken_[rank] = false;
      if (const auto action = best_ready(rank)) start(rank, *action);
    }
    woken_.clear();
  }

  ScheduleKind kind_;
  const MicrobatchGraphs& graphs_;
  const std::vector<int>& limits_;
  std::vector<std::vector<Directions<Progress>>> progress_;  // by program and stage
  std::vector<std::vector<Visit>> stages_of_rank_;           // ascending
  std::vector<int> forwards_left_;                           // by rank: not started
  std::vector<Directions<std::vector<int>>> left_of_;        // by rank and microbatch: not started; empty for one program
  std::vector<InFlight> in_flight_;                          // by rank
  std::vector<Action> running_;                              // at most one of each rank; all take equally long
  std::vector<bool> is_woken_;                               // by rank
  std::vector<int> woken_;
  std::vector<Action> started_;  // with what stands directly behind each
};

/// By stage number, the least of what the programs would have alone.
std::vector<int> common_limits(const ScheduleOptions& options, const MicrobatchGraphs& graphs) {
  const int all = graphs.num_microbatches();
  std::vector<int> common(graphs.most_stages(), std::numeric_limits<int>::max());
  for (int m = 0; m < all; ++m) {
    if (m > 0 && graphs.program_of(m) == graphs.program_of(m - 1)) continue;
    const std::vector<int> own = in_flight_limits(options, graphs.num_ranks(), graphs.num_stages(m), all);
    for (size_t stage = 0; stage < own.size(); ++stage) {
      common[stage] = std::min(common[stage], own[stage]);
    }
  }
  return common;
}

}  // namespace

std::vector<int> in_flight_limits(const ScheduleOptions& options, int num_ranks, int num_stages, int num_microbatches) {
  std::vector<int> limits(num_stages, num_microbatches);
  if (options.kind == ScheduleKind::kSimple) return limits;
  const int active = options.active_microbatches == 0 ? num_ranks : options.active_microbatches;
  for (int64_t stage = 0; stage < num_stages; ++stage) {
    const int64_t depth = num_stages <= num_ranks ? stage : stage * num_ranks / num_stages;
    limits[stage] = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(active - depth, num_microbatches)));
  }
  return limits;
}

Schedule generate(const ScheduleOptions& options, std::span<const StageGraph* const> graph_of_microbatch) {
  const MicrobatchGraphs graphs(graph_of_microbatch);
  const bool is_loop = options.kind == ScheduleKind::kInterleaved && options.active_microbatches == 0 &&
                       is_looped(graphs, options.virtual_stages);
  if (is_loop) return schedule_of(looped_columns(graphs, options.virtual_stages), graphs);
  Schedule schedule;
  schedule.num_ranks = graphs.num_ranks();
  schedule.num_microbatches = graphs.num_microbatches();
  schedule.in_flight_limits = common_limits(options, graphs);
  const std::vector<Action> computations = Generator(options.kind, graphs, schedule.in_flight_limits).run();
  const size_t num_demanded = demanded_computations(graphs).size();
  TORCH_INTERNAL_ASSERT(computations.size() == num_demanded, "generated ", computations.size(), " of ", num_demanded,
                        " computations");
  schedule.columns = insert_transfers(computations, graphs);
  return schedule;
}

Schedule generate(const ScheduleOptions& options, const StageGraph& graph, int num_microbatches) {
  const std::vector<const StageGraph*> graphs(std::max(0, num_microbatches), &graph);
  return generate(options, graphs);
}

}  // namespace smp::partitioner
