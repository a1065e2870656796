// Spans of all steps lie one after the other in one vector.
#include "runtime/executor/timeline.h"

#include <algorithm>

namespace smp::runtime {

using namespace partitioner;

TimelineRecorder::TimelineRecorder(int64_t num_warm_up_steps, int64_t num_recorded_steps)
    : num_warm_up_(num_warm_up_steps), num_recorded_(num_recorded_steps) {}

void TimelineRecorder::begin_step() {
  spans_.resize(now_.first_span);
  is_counted_ = false;
  now_.start_ns = outside_since_ns_ = steady_now_ns();
}

void TimelineRecorder::begin_round(bool leads) {
  add({.activity = leads ? Activity::kBody : Activity::kMessage, .start_ns = outside_since_ns_});
}

void TimelineRecorder::end_round() { outside_since_ns_ = steady_now_ns(); }

void TimelineRecorder::add(Span span) {
  span.end_ns = steady_now_ns();
  spans_.push_back(span);
}

void TimelineRecorder::count_step(int64_t number, bool trains) {
  now_.number = number;
  now_.trains = trains;
  is_counted_ = true;
}

bool TimelineRecorder::end_step() {
  if (!is_counted_ || phase_ == Phase::kIsFull) return false;
  now_.end_ns = steady_now_ns();
  steps_.push_back(now_);
  most_spans_ = std::max(most_spans_, spans_.size() - now_.first_span);
  now_.first_span = spans_.size();
  is_counted_ = false;
  const auto num_steps = static_cast<int64_t>(steps_.size());
  if (phase_ == Phase::kWarmsUp) return num_steps == num_warm_up_ && enter(Phase::kRecords);
  return num_steps == num_recorded_ && enter(Phase::kIsFull);
}

bool TimelineRecorder::enter(Phase next) {
  phase_ = next;
  if (next != Phase::kRecords) return true;
  spans_.clear();
  steps_.clear();
  now_.first_span = 0;
  spans_.reserve(static_cast<size_t>(num_recorded_ + 1) * most_spans_);  // one more: a step that is refused
  steps_.reserve(static_cast<size_t>(num_recorded_));
  return true;
}

std::vector<RankStep> TimelineRecorder::steps() const {
  std::vector<RankStep> steps;
  if (phase_ == Phase::kWarmsUp) return steps;
  for (size_t s = 0; s < steps_.size(); ++s) {
    const Step& step = steps_[s];
    const size_t end = s + 1 < steps_.size() ? steps_[s + 1].first_span : now_.first_span;
    RankStep& made = steps.emplace_back(RankStep{step.number, step.trains, step.start_ns, step.end_ns, {}});
    made.spans.assign(spans_.begin() + static_cast<ptrdiff_t>(step.first_span),
                      spans_.begin() + static_cast<ptrdiff_t>(end));
  }
  return steps;
}

}  // namespace smp::runtime
