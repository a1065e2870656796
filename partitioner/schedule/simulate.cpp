// Predicts how a schedule runs by performing exactly its table.
#include "partitioner/schedule/simulate.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "partitioner/schedule/walk.h"

namespace smp::partitioner {
namespace {

class Simulator {
 public:
  Simulator(const Schedule& schedule, const SimulationInput& input)
      : schedule_(schedule), input_(input), clock_us_(schedule.columns.size(), 0), busy_us_(schedule.columns.size(), 0) {
    for (const EdgeTime& transfer : input.transfers) transfer_us_[transfer.edge] = transfer.us;
    for (const auto& column : schedule.columns) {
      result_.times.emplace_back(column.size());
      arrival_us_.emplace_back(column.size());
    }
  }

  Simulation run() {
    const std::vector<Position> stuck = walk(schedule_, [this](Position at, Position sender) { perform(at, sender); });
    TORCH_CHECK_VALUE(stuck.empty(), "schedule simulation: expected a schedule that passes ",
                      "check(), got one that deadlocks on rank ", stuck.empty() ? 0 : stuck[0].rank, " at position ",
                      stuck.empty() ? 0 : stuck[0].index, ".");
    finish();
    return std::move(result_);
  }

 private:
  void perform(Position at, Position sender) {
    const Action& action = schedule_.columns[at.rank][at.index];
    double& clock = clock_us_[at.rank];
    ActionTime& time = result_.times[at.rank][at.index];
    time.start_us = clock;
    if (action.is_compute()) {
      compute(at.rank, action);
    } else if (action.is_send()) {
      send(at, action);
    } else {
      const double own_us = input_.transfers_occupy_ranks ? transfer_us({action.peer, action.stage}) : 0;
      clock = std::max(clock + own_us, arrival_us_[sender.rank][sender.index]);
    }
    time.end_us = clock;
  }

  void compute(int rank, const Action& action) {
    const double us = time_of(action).of(action.kind);
    clock_us_[rank] += us;
    busy_us_[rank] += us;
  }

  const StageTime& time_of(const Action& action) const {
    if (input_.microbatch_times.empty()) return input_.times[action.stage];
    return input_.microbatch_times[action.stage][action.microbatch];
  }

  void send(Position at, const Action& action) {
    const Edge edge{action.stage, action.peer};
    double& channel_free = channel_free_us_[edge];
    channel_free = std::max(channel_free, clock_us_[at.rank]) + transfer_us(edge);
    arrival_us_[at.rank][at.index] = channel_free;
    if (input_.transfers_occupy_ranks) clock_us_[at.rank] = channel_free;
  }

  double transfer_us(const Edge& edge) const {
    const auto found = transfer_us_.find(edge);
    return found == transfer_us_.end() ? 0 : found->second;
  }

  void finish() {
    for (double clock : clock_us_) result_.makespan_us = std::max(result_.makespan_us, clock);
    for (size_t rank = 0; rank < clock_us_.size(); ++rank) {
      const double busy = result_.makespan_us > 0 ? busy_us_[rank] / result_.makespan_us : 1;
      result_.bubble += (1 - busy) / static_cast<double>(clock_us_.size());
    }
  }

  const Schedule& schedule_;
  const SimulationInput& input_;
  Simulation result_;
  std::vector<double> clock_us_;  // by rank
  std::vector<double> busy_us_;   // by rank
  std::map<Edge, double> transfer_us_;
  std::map<Edge, double> channel_free_us_;
  std::vector<std::vector<double>> arrival_us_;  // by the position of the send
};

void check_input(const Schedule& schedule, const SimulationInput& input) {
  const size_t num_stages = schedule.in_flight_limits.size();
  const size_t num_given = input.microbatch_times.empty() ? input.times.size() : input.microbatch_times.size();
  TORCH_CHECK_VALUE(num_given == num_stages, "schedule simulation: expected times of ", num_stages, " stages, got ",
                    num_given, ".");
  const auto check_time = [](double us) {
    TORCH_CHECK_VALUE(std::isfinite(us) && us >= 0, "schedule simulation: expected finite times of at least 0, got ", us,
                      " us.");
  };
  const auto check_times = [&](const std::vector<StageTime>& times) {
    for (const StageTime& time : times) {
      for (const double us : time.us) check_time(us);
    }
  };
  check_times(input.times);
  for (const std::vector<StageTime>& times : input.microbatch_times) {
    TORCH_CHECK_VALUE(times.size() == static_cast<size_t>(schedule.num_microbatches),
                      "schedule simulation: expected times of ", schedule.num_microbatches, " microbatches of a stage, got ",
                      times.size(), ".");
    check_times(times);
  }
  for (const EdgeTime& transfer : input.transfers) check_time(transfer.us);
}

}  // namespace

Simulation simulate(const Schedule& schedule, const SimulationInput& input) {
  check_input(schedule, input);
  return Simulator(schedule, input).run();
}

}  // namespace smp::partitioner
