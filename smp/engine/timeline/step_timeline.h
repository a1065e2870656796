// The timeline of a job on this rank: when it records, how the ranks' records come together, and where they are written.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "partitioner/report/timeline.h"
#include "runtime/exchange/common_clock.h"
#include "runtime/executor/timeline.h"
#include "smp/engine/context/context.h"

namespace smp::partitioner {
struct SimulationInput;
}

namespace smp::engine {

struct Program;
class Programs;

/// The file of the drawing: `trace` with .svg in place of .json, or behind its name.
std::string drawing_path(const std::string& trace);

/// Why the files of Config::timeline could not be written; empty: they can. Leaves earlier ones as they are.
std::string timeline_complaint(const std::string& trace);

/// All ranks count the same steps, also where some replica has no batch left (smp::join), so that all come to the
/// collective parts together.
class StepTimeline {
 public:
  /// Steps that are not recorded: the first plans and places, tapes are recorded in the second and compared by the third.
  static constexpr int64_t kNumWarmUpSteps = 3;

  explicit StepTimeline(Context& context);

  runtime::TimelineRecorder& recorder() { return recorder_; }

  /// The step that the recorder has begun has run, as these programs by microbatch (none: it was another replica's), which
  /// `planner` has planned.
  void count_step(bool trains, const std::vector<std::shared_ptr<Program>>& programs, const Programs& planner);
  /// Behind the last warm-up step compares clocks, behind the last recorded one writes the files. Collective over the world
  /// then. True: there is nothing left to do.
  bool end_step();
  /// Writes what there is. Collective over the world.
  void finish();

 private:
  using Prediction = std::shared_ptr<const partitioner::SimulationInput>;  // null: the step had several programs

  bool writes() const { return context_.world->rank() == 0; }
  void predict(const std::vector<std::shared_ptr<Program>>& programs, const Programs& planner);
  void publish() const;
  partitioner::RankTimeline own_record() const;  // on the common clock; collective
  void write(const std::vector<partitioner::RankTimeline>& ranks) const;

  Context& context_;
  runtime::TimelineRecorder recorder_;
  runtime::ClockReading first_reading_;
  int64_t num_steps_ = 0;  // of the job
  uint64_t predicted_hash_ = 0;
  Prediction predicted_;                 // of the step in progress; this and the next where the files are written
  std::vector<Prediction> predictions_;  // of recorded steps
};

}  // namespace smp::engine
