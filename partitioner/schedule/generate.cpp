// The event simulation that orders a step's computations.
#include "partitioner/schedule/generate.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <tuple>

#include "partitioner/schedule/dependencies.h"
#include "partitioner/schedule/in_flight.h"
#include "partitioner/schedule/looped.h"
#include "partitioner/schedule/microbatch_graphs.h"
#include "partitioner/schedule/transfers.h"

namespace smp::partitioner {
namespace {

/// Where one stage of one program stands. Work is in microbatch order, so counts say which microbatches are done.
struct Progress {
  int next_forward = 0;    // next microbatch of the program
  int forwards_done = 0;   // forwards of all microbatches of the program below are done
  int next_backward = 0;   // next microbatch of the program with a backward here
  int backwards_done = 0;  // backwards of all microbatches of the program below are done
};

/// Computations that one rank has still to start, by microbatch.
using WorkLeft = std::vector<int>;

class Generator {
 public:
  Generator(ScheduleKind kind, const MicrobatchGraphs& graphs, std::vector<int> limits,
            std::vector<std::vector<Action>> loops)
      : kind_(kind),
        graphs_(graphs),
        limits_(std::move(limits)),
        progress_(graphs.num_programs()),
        loops_(std::move(loops)),
        num_started_(graphs.num_ranks(), 0),
        stages_of_rank_(graphs.num_ranks()),
        forwards_left_(graphs.num_ranks(), 0),
        forwards_left_of_(graphs.num_ranks()),
        backwards_left_of_(graphs.num_ranks()),
        in_flight_(graphs.num_ranks()),
        running_(graphs.num_ranks()),
        is_woken_(graphs.num_ranks(), false) {
    for (int m = 0; m < graphs.num_microbatches(); ++m) add_microbatch(m);
  }

  /// The computations of all ranks, by start time; an order that respects the dependencies.
  std::vector<Action> run() {
    for (int rank = 0; rank < graphs_.num_ranks(); ++rank) wake(rank);
    start_woken(0);
    while (!completions_.empty()) {
      const int64_t now = completions_.top().first;
      while (!completions_.empty() && completions_.top().first == now) {
        const int rank = completions_.top().second;
        completions_.pop();
        complete(rank);
      }
      start_woken(now);
    }
    return std::move(started_);
  }

 private:
  using Completion = std::pair<int64_t, int>;  // (time, rank)
  struct Visit {
    int program = 0;
    int stage = 0;
  };

  void add_microbatch(int m) {
    const int program = graphs_.program_of(m);
    std::vector<Progress>& progress = progress_[program];
    const bool is_first = progress.empty() && graphs_.num_stages(m) > 0;
    if (is_first) progress.resize(graphs_.num_stages(m));
    for (int stage = 0; stage < graphs_.num_stages(m); ++stage) {
      const int rank = graphs_.rank_of(stage, m);
      ++forwards_left_[rank];
      if (is_first) {
        stages_of_rank_[rank].push_back({program, stage});
        progress[stage].next_forward = next_of(program, -1);
        progress[stage].next_backward = next_backward(program, stage, -1);
      }
      if (graphs_.num_programs() == 1) continue;
      forwards_left_of_[rank].resize(graphs_.num_microbatches(), 0);
      backwards_left_of_[rank].resize(graphs_.num_microbatches(), 0);
      ++forwards_left_of_[rank][m];
      if (graphs_.has_backward(stage, m)) ++backwards_left_of_[rank][m];
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
  bool is_turn_of(int m, const WorkLeft& left) const {
    if (graphs_.num_programs() == 1) return true;
    for (int before = 0; before < m; ++before) {
      if (left[before] > 0 && graphs_.program_of(before) != graphs_.program_of(m)) return false;
    }
    return true;
  }

  /// For a transfer, what it moves.
  bool is_done(const Action& needed) const {
    const int stage = needed.is_compute() ? needed.stage : needed.peer;
    if (stage == kInputStage) return true;
    const Progress& maker = progress_[graphs_.program_of(needed.microbatch)][stage];
    return (needed.is_forward() ? maker.forwards_done : maker.backwards_done) > needed.microbatch;
  }

  bool is_ready(int rank, const Action& action) const {
    const int m = action.microbatch;
    if (m == graphs_.num_microbatches()) return false;
    const bool is_forward = action.kind == ActionKind::kForward;
    // Without a backward, too: with a limit of 1 no microbatch meets what another needs.
    if (is_forward && in_flight_[rank].held(graphs_.program_of(m), action.stage) >= limits_[action.stage]) return false;
    if (!is_forward && kind_ == ScheduleKind::kSimple && forwards_left_[rank] > 0) return false;
    bool all_done = true;
    for_each_dependency(action, graphs_, [&](const Action& needed) { all_done = all_done && is_done(needed); });
    return all_done && is_turn_of(m, (is_forward ? forwards_left_of_ : backwards_left_of_)[rank]);
  }

  /// The next of the rank's column.
  std::optional<Action> next_in_loop(int rank) const {
    const std::vector<Action>& column = loops_[rank];
    if (num_started_[rank] == column.size()) return std::nullopt;
    const Action& action = column[num_started_[rank]];
    return is_ready(rank, action) ? std::optional(action) : std::nullopt;
  }

  std::optional<Action> best_ready(int rank) const {
    if (!loops_.empty()) return next_in_loop(rank);
    std::optional<Action> best;
    // Smaller is better: backward first, then the lowest microbatch, then the deepest stage.
    const auto order = [](const Action& a) { return std::tuple(a.kind == ActionKind::kForward, a.microbatch, -a.stage); };
    const auto offer = [&](const Action& action) {
      if (is_ready(rank, action) && (!best || order(action) < order(*best))) best = action;
    };
    for (const Visit visit : stages_of_rank_[rank]) {
      const Progress& own = progress_[visit.program][visit.stage];
      offer({ActionKind::kBackward, visit.stage, own.next_backward});
      offer({ActionKind::kForward, visit.stage, own.next_forward});
    }
    return best;
  }

  void start(int rank, const Action& action, int64_t now) {
    const int stage = action.stage, m = action.microbatch;
    const int program = graphs_.program_of(m);
    const bool is_forward = action.kind == ActionKind::kForward;
    Progress& own = progress_[program][stage];
    if (is_forward) {
      own.next_forward = next_of(program, m);
      --forwards_left_[rank];
      if (graphs_.has_backward(stage, m)) in_flight_[rank].add(program, stage, m);
    } else {
      own.next_backward = next_backward(program, stage, m);
    }
    if (graphs_.num_programs() > 1) {
      --(is_forward ? forwards_left_of_ : backwards_left_of_)[rank][m];
    }
    ++num_started_[rank];
    running_[rank] = action;
    started_.push_back(action);
    if (!is_forward) started_.push_back({ActionKind::kWeightGradient, stage, m});
    completions_.emplace(now + 1, rank);
  }

  void complete(int rank) {
    const Action action = *running_[rank];
    running_[rank].reset();
    const int program = graphs_.program_of(action.microbatch);
    Progress& own = progress_[program][action.stage];
    const Neighbours& neighbours = graphs_.neighbours(action.microbatch);
    const bool is_forward = action.kind == ActionKind::kForward;
    if (is_forward) {
      own.forwards_done = action.microbatch + 1;
    } else {
      own.backwards_done = action.microbatch + 1;
      in_flight_[rank].remove(program, action.stage, action.microbatch);
    }
    wake(rank);
    const auto& targets = is_forward ? neighbours.activation_targets : neighbours.gradient_targets;
    for (int target : targets[action.stage]) wake(graphs_.rank_of(target, action.microbatch));
  }

  void wake(int rank) {
    if (is_woken_[rank]) return;
    is_woken_[rank] = true;
    woken_.push_back(rank);
  }

  /// Only ranks that a completion concerns can have new work, so the others are not looked at.
  void start_woken(int64_t now) {
    std::sort(woken_.begin(), woken_.end());
    for (int rank : woken_) {
      is_woken_[rank] = false;
      if (running_[rank]) continue;
      if (const auto action = best_ready(rank)) start(rank, *action, now);
    }
    woken_.clear();
  }

  ScheduleKind kind_;
  const MicrobatchGraphs& graphs_;
  std::vector<int> limits_;
  std::vector<std::vector<Progress>> progress_;     // by program and stage
  std::vector<std::vector<Action>> loops_;          // by rank; empty: the best task first
  std::vector<size_t> num_started_;                 // by rank
  std::vector<std::vector<Visit>> stages_of_rank_;  // ascending
  std::vector<int> forwards_left_;                  // by rank: not started
  std::vector<WorkLeft> forwards_left_of_;          // by rank; empty for one program
  std::vector<WorkLeft> backwards_left_of_;
  std::vector<InFlight> in_flight_;             // by rank
  std::vector<std::optional<Action>> running_;  // by rank
  std::vector<bool> is_woken_;                  // by rank
  std::vector<int> woken_;
  std::vector<Action> started_;
  std::priority_queue<Completion, std::vector<Completion>, std::greater<>> completions_;
};

void check_options(const ScheduleOptions& options) {
  TORCH_CHECK_VALUE(options.virtual_stages >= 1, "schedule: expected virtual_stages >= 1, got ", options.virtual_stages,
                    ".");
}

size_t num_computations(const MicrobatchGraphs& graphs) {
  size_t total = 0;
  for (int m = 0; m < graphs.num_microbatches(); ++m) {
    for (int stage = 0; stage < graphs.num_stages(m); ++stage) {
      total += graphs.has_backward(stage, m) ? kNumComputations : 1;
    }
  }
  return total;
}

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
  const int active_microbatches = options.active_microbatches;
  TORCH_CHECK_VALUE(active_microbatches >= 0, "schedule: expected active_microbatches >= 1, or 0 for the default, got ",
                    active_microbatches, ".");
  std::vector<int> limits(num_stages, num_microbatches);
  if (options.kind == ScheduleKind::kSimple) return limits;
  const int active = active_microbatches == 0 ? num_ranks : active_microbatches;
  for (int64_t stage = 0; stage < num_stages; ++stage) {
    const int64_t depth = num_stages <= num_ranks ? stage : stage * num_ranks / num_stages;
    limits[stage] = static_cast<int>(std::max<int64_t>(1, active - depth));
  }
  return limits;
}

Schedule generate(const ScheduleOptions& options, std::span<const StageGraph* const> graph_of_microbatch) {
  const MicrobatchGraphs graphs(graph_of_microbatch);
  check_options(options);
  Schedule schedule;
  schedule.num_ranks = graphs.num_ranks();
  schedule.num_microbatches = graphs.num_microbatches();
  schedule.in_flight_limits = common_limits(options, graphs);
  std::vector<std::vector<Action>> loops;
  if (options.kind == ScheduleKind::kInterleaved && options.active_microbatches == 0 &&
      is_looped(graphs, options.virtual_stages)) {
    loops = looped_columns(graphs, options.virtual_stages);
    schedule.in_flight_limits.assign(graphs.most_stages(), graphs.num_microbatches());
  }
  const bool is_loop = !loops.empty();
  const std::vector<Action> computations =
      Generator(options.kind, graphs, schedule.in_flight_limits, std::move(loops)).run();
  if (is_loop) schedule.in_flight_limits = most_in_flight(graphs, computations);
  TORCH_INTERNAL_ASSERT(computations.size() == num_computations(graphs), "generated ", computations.size(), " of ",
                        num_computations(graphs), " computations");
  schedule.columns = insert_transfers(computations, graphs);
  return schedule;
}

Schedule generate(const ScheduleOptions& options, const StageGraph& graph, int num_microbatches) {
  const std::vector<const StageGraph*> graphs(std::max(0, num_microbatches), &graph);
  return generate(options, graphs);
}

}  // namespace smp::partitioner
