// The timeline of a job on this rank: when it records, how the ranks' records come together, and where they are written.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "partitioner/report/timeline.h"
#include "runtime/common_clock.h"
#include "runtime/timeline.h"
#include "smp/detail/context.h"

namespace smp::detail {

struct Program;
class Programs;

/// The file of the drawing: `trace` with .svg in place of .json, or behind its name.
std::string drawing_path(const std::string& trace);

/// Throws c10::ValueError where the files of Config::timeline could not be written. Leaves earlier ones as they are.
void check_timeline_path(const std::string& trace);

/// All ranks count the same steps, also where some replica has no batch left (smp::join), so that all come to the
/// collective parts together.
class StepTimeline {
 public:
  /// Steps that are not recorded: the first plans and places, tapes are compared in the second.
  static constexpr int64_t kNumWarmUpSteps = 2;

  explicit StepTimeline(Context& context);

  /// Null where nothing is recorded any more.
  runtime::TimelineRecorder* recorder() { return is_over() ? nullptr : &recorder_; }

  void begin_step();
  /// The step has run, as these programs by microbatch (none: it was another replica's) behind so many others.
  void count_step(int64_t number, bool trains, const std::vector<std::shared_ptr<Program>>& programs);
  /// Behind the last warm-up step compares clocks, behind the last recorded one writes the files. Collective over the world
  /// then.
  void end_step(const Programs& programs);
  /// Writes what there is, if that has not happened. Collective over the world.
  void finish(const Programs& programs);

 private:
  bool is_over() const { return recorder_.phase() == runtime::TimelineRecorder::Phase::kIsFull; }
  bool writes() const { return context_.world->rank() == 0; }
  void publish(const Programs& programs);
  std::string encode() const;
  void write(const std::vector<partitioner::RankTimeline>& ranks, const Programs& programs) const;

  Context& context_;
  runtime::TimelineRecorder recorder_;
  runtime::ClockReading first_reading_;
  // Where the files are written: of the step in progress, and of those recorded.
  std::vector<std::shared_ptr<Program>> programs_;
  std::vector<std::vector<std::shared_ptr<Program>>> programs_of_step_;
  bool is_published_ = false;
};

}  // namespace smp::detail
