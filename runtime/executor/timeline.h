// Records what this rank does in the steps of a job, span by span. Knows neither files nor the clocks of other ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "partitioner/report/timeline.h"
#include "runtime/device/device.h"

namespace smp::runtime {

/// This rank's clock, in nanoseconds from a moment of its own, when its device has done what it was given.
inline int64_t steady_now_ns() { return this_ranks_device().now_ns(); }

/// Steps of a warm-up, whose record shows how much memory a step takes and is then forgotten, and the steps to record.
/// While steps are like those of the warm-up, recording allocates nothing.
class TimelineRecorder {
 public:
  enum class Phase { kWarmsUp, kRecords, kIsFull };

  TimelineRecorder(int64_t num_warm_up_steps, int64_t num_recorded_steps);

  Phase phase() const { return phase_; }

  /// Forgets a step that has begun and did not end.
  void begin_step();
  /// What happened since the step began, or since the last round, was not a round: the leader's body, the followers' wait.
  void begin_round(bool leads);
  void end_round();
  /// From its start until now.
  void add(partitioner::Span span);
  /// The step counts: a step that is refused does not. `number`: of steps before it.
  void count_step(int64_t number, bool trains);
  /// True where a phase has ended with the step. Ranks that count the same steps find the same.
  bool end_step();

  /// Steps that have ended in this phase; in the last one, those recorded.
  size_t num_steps() const { return steps_.size(); }
  /// What has been recorded behind the warm-up.
  std::vector<partitioner::RankStep> steps() const;

 private:
  struct Step {
    int64_t number = 0;
    bool trains = false;
    int64_t start_ns = 0, end_ns = 0;
    size_t first_span = 0;
  };
  bool enter(Phase next);

  int64_t num_warm_up_, num_recorded_;
  Phase phase_ = Phase::kWarmsUp;
  std::vector<partitioner::Span> spans_;
  std::vector<Step> steps_;  // that have ended
  size_t most_spans_ = 0;    // of a step
  Step now_;
  int64_t outside_since_ns_ = 0;
  bool is_counted_ = false;
};

/// Adds what happens during its life; `recorder` may be null.
class RecordedSpan {
 public:
  RecordedSpan(TimelineRecorder* recorder, partitioner::Activity activity)
      : recorder_(recorder), span_{.activity = activity} {
    if (recorder_ != nullptr) span_.start_ns = steady_now_ns();
  }
  RecordedSpan(TimelineRecorder* recorder, const partitioner::Action& action) : recorder_(recorder) {
    if (recorder_ == nullptr) return;
    span_ = {partitioner::Activity::kAction, action, steady_now_ns(), 0};
  }
  ~RecordedSpan() {
    if (recorder_ != nullptr) recorder_->add(span_);
  }
  RecordedSpan(const RecordedSpan&) = delete;
  RecordedSpan& operator=(const RecordedSpan&) = delete;

 private:
  TimelineRecorder* recorder_;
  partitioner::Span span_;
};

/// A round of a step; `recorder` may be null.
class RecordedRound {
 public:
  RecordedRound(TimelineRecorder* recorder, bool leads) : recorder_(recorder) {
    if (recorder_ != nullptr) recorder_->begin_round(leads);
  }
  ~RecordedRound() {
    if (recorder_ != nullptr) recorder_->end_round();
  }
  RecordedRound(const RecordedRound&) = delete;
  RecordedRound& operator=(const RecordedRound&) = delete;

 private:
  TimelineRecorder* recorder_;
};

}  // namespace smp::runtime
