// The event simulation that orders a step's computations.
#include "partitioner/schedule/generate.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <queue>
#include <tuple>

#include "partitioner/schedule/microbatch_graphs.h"
#include "partitioner/schedule/transfers.h"

namespace smp::partitioner {
namespace {

/// Where one stage stands. Work is in microbatch order, so counts say which microbatches are done.
struct Progress {
  int forwards_started = 0;
  int forwards_done = 0;
  int next_backward = 0;   // next microbatch with a backward here
  int backwards_done = 0;  // backwards of all microbatches below are done
  int in_flight = 0;
};

class Generator {
 public:
  Generator(ScheduleKind kind, const MicrobatchGraphs& graphs, std::vector<int> limits,
            const std::vector<StageTime>& times)
      : kind_(kind),
        graphs_(graphs),
        limits_(std::move(limits)),
        times_(times),
        progress_(graphs.num_stages()),
        stages_of_rank_(graphs.num_ranks()),
        forwards_left_(graphs.num_ranks(), 0),
        running_(graphs.num_ranks()),
        is_woken_(graphs.num_ranks(), false) {
    for (int stage = 0; stage < graphs.num_stages(); ++stage) {
      stages_of_rank_[graphs.rank_of(stage)].push_back(stage);
      forwards_left_[graphs.rank_of(stage)] += graphs.num_microbatches();
      skip_to_backward(stage);
    }
  }

  /// The computations of all ranks, by start time; an order that respects the dependencies.
  std::vector<Action> run() {
    for (int rank = 0; rank < graphs_.num_ranks(); ++rank) wake(rank);
    start_woken(0);
    while (!completions_.empty()) {
      const double now = completions_.top().first;
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
  using Completion = std::pair<double, int>;  // (time, rank)

  void skip_to_backward(int stage) {
    int& next = progress_[stage].next_backward;
    while (next < graphs_.num_microbatches() && !graphs_.has_backward(stage, next)) ++next;
  }

  bool forward_is_ready(int stage) const {
    const Progress& own = progress_[stage];
    const int m = own.forwards_started;
    if (m == graphs_.num_microbatches()) return false;
    if (graphs_.has_backward(stage, m) && own.in_flight >= limits_[stage]) return false;
    const auto& sources = graphs_.neighbours(m).activation_sources[stage];
    return std::all_of(sources.begin(), sources.end(), [&](int source) {
      return source == kInputStage || progress_[source].forwards_done > m;
    });
  }

  bool backward_is_ready(int stage) const {
    const Progress& own = progress_[stage];
    const int m = own.next_backward;
    if (m == graphs_.num_microbatches() || own.forwards_done <= m) return false;
    if (kind_ == ScheduleKind::kSimple && forwards_left_[graphs_.rank_of(stage)] > 0) return false;
    const auto& sources = graphs_.neighbours(m).gradient_sources[stage];
    return std::all_of(sources.begin(), sources.end(),
                       [&](int source) { return progress_[source].backwards_done > m; });
  }

  std::optional<Action> best_ready(int rank) const {
    std::optional<Action> best;
    // Smaller is better: backward first, then the lowest microbatch, then the deepest stage.
    const auto order = [](const Action& a) {
      return std::tuple(a.kind == ActionKind::kForward, a.microbatch, -a.stage);
    };
    const auto offer = [&](const Action& action) {
      if (!best || order(action) < order(*best)) best = action;
    };
    for (int stage : stages_of_rank_[rank]) {
      const Progress& own = progress_[stage];
      if (backward_is_ready(stage)) offer({ActionKind::kBackward, stage, own.next_backward});
      if (forward_is_ready(stage)) offer({ActionKind::kForward, stage, own.forwards_started});
    }
    return best;
  }

  void start(int rank, const Action& action, double now) {
    Progress& own = progress_[action.stage];
    if (action.kind == ActionKind::kForward) {
      ++own.forwards_started;
      --forwards_left_[rank];
      if (graphs_.has_backward(action.stage, action.microbatch)) ++own.in_flight;
    } else {
      ++own.next_backward;
      skip_to_backward(action.stage);
    }
    const StageTime time = times_.empty() ? StageTime{} : times_[action.stage];
    running_[rank] = action;
    started_.push_back(action);
    completions_.emplace(
        now + (action.kind == ActionKind::kForward ? time.forward_us : time.backward_us), rank);
  }

  void complete(int rank) {
    const Action action = *running_[rank];
    running_[rank].reset();
    Progress& own = progress_[action.stage];
    const Neighbours& neighbours = graphs_.neighbours(action.microbatch);
    const bool is_forward = action.kind == ActionKind::kForward;
    if (is_forward) {
      own.forwards_done = action.microbatch + 1;
    } else {
      own.backwards_done = action.microbatch + 1;
      --own.in_flight;
    }
    wake(rank);
    const auto& targets = is_forward ? neighbours.activation_targets : neighbours.gradient_targets;
    for (int target : targets[action.stage]) wake(graphs_.rank_of(target));
  }

  void wake(int rank) {
    if (is_woken_[rank]) return;
    is_woken_[rank] = true;
    woken_.push_back(rank);
  }

  /// Only ranks that a completion concerns can have new work, so the others are not looked at.
  void start_woken(double now) {
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
  const std::vector<StageTime>& times_;
  std::vector<Progress> progress_;                // by stage
  std::vector<std::vector<int>> stages_of_rank_;  // ascending
  std::vector<int> forwards_left_;                // by rank: not started
  std::vector<std::optional<Action>> running_;    // by rank
  std::vector<bool> is_woken_;                    // by rank
  std::vector<int> woken_;
  std::vector<Action> started_;
  std::priority_queue<Completion, std::vector<Completion>, std::greater<>> completions_;
};

void check_options(const MicrobatchGraphs& graphs, const ScheduleOptions& options) {
  const int num_stages = graphs.num_stages();
  TORCH_CHECK_VALUE(options.times.empty() || static_cast<int>(options.times.size()) == num_stages,
                    "schedule: expected a time for each of ", num_stages, " stages, got ",
                    options.times.size(), ". Leave `times` empty for equal stages.");
  for (const StageTime& time : options.times) {
    TORCH_CHECK_VALUE(std::isfinite(time.forward_us) && std::isfinite(time.backward_us) &&
                          time.forward_us >= 0 && time.backward_us >= 0,
                      "schedule: expected finite times of at least 0, got forward_us=",
                      time.forward_us, ", backward_us=", time.backward_us, ".");
  }
}

size_t num_computations(const MicrobatchGraphs& graphs) {
  size_t total = 0;
  for (int m = 0; m < graphs.num_microbatches(); ++m) {
    for (int stage = 0; stage < graphs.num_stages(); ++stage) {
      total += graphs.has_backward(stage, m) ? 2 : 1;
    }
  }
  return total;
}

}  // namespace

std::vector<int> in_flight_limits(ScheduleKind kind, int num_ranks, int num_stages,
                                  int num_microbatches, int active_microbatches) {
  TORCH_CHECK_VALUE(active_microbatches >= 0,
                    "schedule: expected active_microbatches >= 1, or 0 for the default, got ",
                    active_microbatches, ".");
  std::vector<int> limits(num_stages, num_microbatches);
  if (kind == ScheduleKind::kSimple) return limits;
  const int active = active_microbatches == 0 ? num_ranks : active_microbatches;
  for (int64_t stage = 0; stage < num_stages; ++stage) {
    const int64_t depth = num_stages <= num_ranks ? stage : stage * num_ranks / num_stages;
    limits[stage] = static_cast<int>(std::max<int64_t>(1, active - depth));
  }
  return limits;
}

Schedule generate(ScheduleKind kind, std::span<const StageGraph* const> graph_of_microbatch,
                  const ScheduleOptions& options) {
  const MicrobatchGraphs graphs(graph_of_microbatch);
  check_options(graphs, options);
  Schedule schedule;
  schedule.num_ranks = graphs.num_ranks();
  schedule.num_microbatches = graphs.num_microbatches();
  schedule.in_flight_limits =
      in_flight_limits(kind, graphs.num_ranks(), graphs.num_stages(), graphs.num_microbatches(),
                       options.active_microbatches);
  const std::vector<Action> computations =
      Generator(kind, graphs, schedule.in_flight_limits, options.times).run();
  TORCH_INTERNAL_ASSERT(computations.size() == num_computations(graphs), "generated ",
                        computations.size(), " of ", num_computations(graphs), " computations");
  schedule.columns = insert_transfers(computations, graphs);
  return schedule;
}

Schedule generate(ScheduleKind kind, const StageGraph& graph, int num_microbatches,
                  const ScheduleOptions& options) {
  const std::vector<const StageGraph*> graphs(std::max(0, num_microbatches), &graph);
  return generate(kind, graphs, options);
}

}  // namespace smp::partitioner
