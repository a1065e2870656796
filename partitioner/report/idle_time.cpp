// One pass over each rank's spans; waits are followed from rank to rank.
#include "partitioner/report/idle_time.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "partitioner/report/text_table.h"
#include "partitioner/schedule/dependencies.h"

namespace smp::partitioner {
namespace {

using Pieces = std::vector<CausedTime>;

void append(Pieces& pieces, Cause cause, int64_t start_ns, int64_t end_ns) {
  if (end_ns <= start_ns) return;
  if (!pieces.empty() && pieces.back().cause == cause && pieces.back().end_ns == start_ns) {
    pieces.back().end_ns = end_ns;
  } else {
    pieces.push_back({cause, start_ns, end_ns});
  }
}

double duration_us(const Span& span) { return static_cast<double>(span.end_ns - span.start_ns) / kNsPerUs; }

/// The same table on ranks that share the work equally, that of each kind for itself.
SimulationInput balanced_times(const Schedule& schedule, const SimulationInput& measured) {
  SimulationInput balanced = measured;
  for (size_t i = 0; i < kNumComputations; ++i) {
    const ActionKind kind = kActionRows[i].kind;
    double total_us = 0;
    for (const auto& stage : measured.microbatch_times) {
      for (const StageTime& time : stage) total_us += time.of(kind);
    }
    const auto number_in = [kind](const std::vector<Action>& column) {
      return std::count_if(column.begin(), column.end(), [kind](const Action& action) { return action.kind == kind; });
    };
    const auto num_ranks = static_cast<double>(std::count_if(schedule.columns.begin(), schedule.columns.end(),
                                                             [&](const auto& column) { return number_in(column) > 0; }));
    for (const auto& column : schedule.columns) {
      const double us = total_us / num_ranks / static_cast<double>(number_in(column));
      for (const Action& action : column) {
        if (action.kind == kind) balanced.microbatch_times[action.stage][action.microbatch].of(kind) = us;
      }
    }
  }
  return balanced;
}

class Attributor {
 public:
  Attributor(const PipelineStep& step, const Schedule& schedule) : step_(step) {
    result_.start_ns = step.front().start_ns;
    for (size_t rank = 0; rank < step.size(); ++rank) {
      if (step[rank].end_ns > step[last_].end_ns) last_ = rank;
      for (const Span& span : step[rank].spans) {
        if (span.activity == Activity::kResults) results_.push_back({rank, span.start_ns});
        if (span.is_action() && span.action.is_send()) sendings_[span.action] = {rank, span.start_ns};
      }
    }
    result_.end_ns = step[last_].end_ns;
    balanced_ = simulate(schedule, balanced_times(schedule, measured_times(step, schedule)));
  }

  StepAttribution run() {
    for (size_t rank = 0; rank < step_.size(); ++rank) {
      result_.ranks.push_back(of_rank(rank));
      auto& sums = result_.ns_of_cause.emplace_back();
      for (const CausedTime& piece : result_.ranks.back()) {
        sums[static_cast<size_t>(piece.cause)] += piece.end_ns - piece.start_ns;
      }
    }
    return std::move(result_);
  }

 private:
  /// Until `until_ns` what a rank waits for is not on its way: `rank` has not come to send it.
  struct Awaited {
    size_t rank = 0;
    int64_t until_ns = 0;
  };

  Awaited awaited(size_t rank, const Span& span) const {
    Awaited found{rank, span.start_ns};
    if (span.is_receive()) {
      const auto sending = sendings_.find(send_of(span.action));
      if (sending != sendings_.end()) found = sending->second;
    } else if (span.activity == Activity::kResults) {
      for (const Awaited& other : results_) {
        if (other.until_ns > found.until_ns) found = other;
      }
    }
    return found;
  }

  static Cause own_cause(const Span& span) {
    if (span.is_compute()) return Cause::kCompute;
    const bool is_host = span.activity == Activity::kBody || span.activity == Activity::kMessage;
    return is_host ? Cause::kHost : Cause::kCommunication;
  }

  /// What a span of a rank went to between two moments of it; kCompute: of this rank, or of one that it waits for.
  void of_span(Pieces& pieces, size_t rank, const Span& span, int64_t from_ns, int64_t to_ns, size_t depth) const {
    const Awaited other = awaited(rank, span);
    const int64_t until_ns = other.rank == rank ? from_ns : std::clamp(other.until_ns, from_ns, to_ns);
    follow(pieces, other.rank, from_ns, until_ns, depth + 1);
    append(pieces, own_cause(span), until_ns, to_ns);
  }

  /// The same of everything that a rank does. Clocks that are wrong can make ranks wait for each other.
  void follow(Pieces& pieces, size_t rank, int64_t from_ns, int64_t to_ns, size_t depth) const {
    if (from_ns >= to_ns) return;
    if (depth > step_.size()) return append(pieces, Cause::kCommunication, from_ns, to_ns);
    const RankStep& own = step_[rank];
    auto span = std::partition_point(own.spans.begin(), own.spans.end(),
                                     [from_ns](const Span& one) { return one.end_ns <= from_ns; });
    int64_t now_ns = from_ns;
    for (; span != own.spans.end() && span->start_ns < to_ns; ++span) {
      const int64_t start_ns = std::max(now_ns, span->start_ns), end_ns = std::min(to_ns, span->end_ns);
      append(pieces, Cause::kHost, now_ns, start_ns);
      if (end_ns > start_ns) of_span(pieces, rank, *span, start_ns, end_ns, depth);
      now_ns = std::max(start_ns, end_ns);
    }
    const int64_t end_ns = std::clamp(own.end_ns, now_ns, to_ns);
    append(pieces, Cause::kHost, now_ns, end_ns);
    follow(pieces, last_, end_ns, to_ns, depth + 1);
  }

  /// Puts pieces of a wait behind those of the rank; of what others compute, `left_ns` is dependency.
  static void add_wait(Pieces& pieces, const Pieces& wait, int64_t& left_ns) {
    Pieces told;
    for (const CausedTime& piece : wait) {
      if (piece.cause != Cause::kCompute) {
        append(told, piece.cause, piece.start_ns, piece.end_ns);
        continue;
      }
      const int64_t until_ns = std::min(piece.end_ns, piece.start_ns + left_ns);
      append(told, Cause::kDependency, piece.start_ns, until_ns);
      append(told, Cause::kImbalance, until_ns, piece.end_ns);
      left_ns -= until_ns - piece.start_ns;
    }
    pieces.insert(pieces.end(), told.begin(), told.end());
  }

  static int64_t wait_ns(const ActionTime& time) { return std::llround((time.end_us - time.start_us) * kNsPerUs); }

  Pieces of_rank(size_t rank) const {
    const RankStep& own = step_[rank];
    const auto& times = balanced_.times[rank];
    // When the rank has nothing left to do: while it exchanges results, and when it has returned.
    int64_t end_left_ns = std::llround((balanced_.makespan_us - (times.empty() ? 0 : times.back().end_us)) * kNsPerUs);
    Pieces pieces;
    size_t num_actions = 0;
    int64_t now_ns = result_.start_ns;
    const auto host_until = [&](int64_t end_ns) {
      if (end_ns > now_ns) pieces.push_back({Cause::kHost, now_ns, end_ns});
      now_ns = std::max(now_ns, end_ns);
    };
    for (const Span& span : own.spans) {
      const size_t index = span.is_action() ? num_actions++ : 0;
      host_until(span.start_ns);
      if (span.end_ns <= now_ns) continue;
      Pieces wait;
      of_span(wait, rank, span, now_ns, span.end_ns, 0);
      if (span.is_receive()) {
        int64_t left_ns = wait_ns(times[index]);
        add_wait(pieces, wait, left_ns);
      } else if (span.activity == Activity::kResults) {
        add_wait(pieces, wait, end_left_ns);
      } else {
        pieces.insert(pieces.end(), wait.begin(), wait.end());
      }
      now_ns = span.end_ns;
    }
    host_until(own.end_ns);
    Pieces tail;
    follow(tail, last_, now_ns, result_.end_ns, 1);
    add_wait(pieces, tail, end_left_ns);
    return pieces;
  }

  const PipelineStep& step_;
  size_t last_ = 0;  // the rank that returns last
  std::unordered_map<Action, Awaited, ActionHash> sendings_;
  std::vector<Awaited> results_;
  Simulation balanced_;
  StepAttribution result_;
};

}  // namespace

const char* name_of(Cause cause) {
  static constexpr std::array<const char*, kNumCauses> kNames{"compute", "dependency", "imbalance", "communication", "host"};
  return kNames[static_cast<size_t>(cause)];
}

double StepAttribution::bubble() const {
  if (num_ns() == 0 || ranks.empty()) return 0;
  double sum = 0;
  for (const auto& sums : ns_of_cause) {
    sum += 1 - static_cast<double>(sums[static_cast<size_t>(Cause::kCompute)]) / static_cast<double>(num_ns());
  }
  return sum / static_cast<double>(ns_of_cause.size());
}

std::optional<Schedule> performed_schedule(const PipelineStep& step) {
  Schedule schedule;
  schedule.num_ranks = static_cast<int>(step.size());
  int num_stages = 0;
  std::unordered_set<Action, ActionHash> performed;
  for (const RankStep& rank : step) {
    auto& column = schedule.columns.emplace_back();
    for (const Span& span : rank.spans) {
      if (!span.is_action()) continue;
      column.push_back(span.action);
      if (!performed.insert(span.action).second) return std::nullopt;
      num_stages = std::max(num_stages, span.action.stage + 1);
      schedule.num_microbatches = std::max(schedule.num_microbatches, span.action.microbatch + 1);
    }
  }
  const bool has_both_ends = std::all_of(performed.begin(), performed.end(), [&](const Action& action) {
    return action.is_compute() || performed.contains(counterpart(action));
  });
  if (schedule.num_microbatches == 0 || !has_both_ends) return std::nullopt;
  schedule.in_flight_limits.assign(static_cast<size_t>(num_stages), schedule.num_microbatches);
  return schedule;
}

SimulationInput measured_times(const PipelineStep& step, const Schedule& schedule) {
  SimulationInput input;
  input.microbatch_times.assign(schedule.in_flight_limits.size(),
                                std::vector<StageTime>(static_cast<size_t>(schedule.num_microbatches), StageTime{{}}));
  for (const RankStep& rank : step) {
    for (const Span& span : rank.spans) {
      if (!span.is_compute()) continue;
      const Action& action = span.action;
      StageTime& time = input.microbatch_times[static_cast<size_t>(action.stage)][static_cast<size_t>(action.microbatch)];
      time.of(action.kind) += duration_us(span);
    }
  }
  return input;
}

StepAttribution attribute(const PipelineStep& step, const Schedule& schedule) { return Attributor(step, schedule).run(); }

std::string idle_table(const StepAttribution& attribution) {
  std::vector<Row> rows{{"rank"}};
  for (size_t c = 0; c < kNumCauses; ++c) rows.front().push_back(name_of(static_cast<Cause>(c)));
  const auto add_row = [&](const std::string& name, const std::array<int64_t, kNumCauses>& sums, double num_ns) {
    Row row{name};
    for (const int64_t ns : sums) {
      const double part = num_ns > 0 ? static_cast<double>(ns) / num_ns : 0;
      row.push_back(percent_text(part) + " (" + time_text(static_cast<double>(ns) / kNsPerUs) + ")");
    }
    rows.push_back(row);
  };
  std::array<int64_t, kNumCauses> total{};
  const auto num_ns = static_cast<double>(attribution.num_ns());
  for (size_t rank = 0; rank < attribution.ns_of_cause.size(); ++rank) {
    const auto& sums = attribution.ns_of_cause[rank];
    for (size_t c = 0; c < kNumCauses; ++c) total[c] += sums[c];
    add_row(std::to_string(rank), sums, num_ns);
  }
  add_row("all", total, num_ns * static_cast<double>(attribution.ns_of_cause.size()));
  return aligned(rows, rows.front().size());
}

}  // namespace smp::partitioner
