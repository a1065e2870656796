// Who is compared with whom, and from where on it counts.
#include "smp/engine/timeline/stragglers.h"

#include <algorithm>
#include <cstdio>

#include "runtime/watch/peer_processes.h"

namespace smp::engine {

namespace {

constexpr double kSlow = 1.5;      // times as long as others
constexpr double kMatters = 0.25;  // of the time from step to step is what the others wait for

std::string printed(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string in_seconds(double ns) { return printed(ns < 1e8 ? "%.4f s" : "%.2f s", ns * 1e-9); }

// The upper one of two in the middle: most ranks are well. 0 without any.
double upper_median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void Pace::join(const Pace& other) {
  for (size_t s = 0; s < sections.size(); ++s) {
    sections[s].ns = std::min(sections[s].ns, other.sections[s].ns);
    sections[s].slowdown = std::min(sections[s].slowdown, other.sections[s].slowdown);
  }
  period_ns = std::min(period_ns, other.period_ns);
  has_run = has_run && other.has_run;
}

PaceRecorder::PaceRecorder() : process_(runtime::this_process().text()) {}

void PaceRecorder::begin_step(int64_t in_calls_ns, int64_t now_ns) {
  begun_ns_ = now_ns;
  between_ns_ = ended_ns_ ? now_ns - in_calls_ns - *ended_ns_ : 0;
}

void PaceRecorder::end_step(int64_t in_calls_ns, int64_t now_ns) { ended_ns_ = now_ns - in_calls_ns; }

void PaceRecorder::add(int64_t computing_ns, std::optional<uint64_t> alike, int64_t now_ns) {
  if (std::exchange(alike_, alike) != alike) {
    is_alike_ = false;
    best_ns_ = {};
  }
  Pace step{.period_ns = now_ns - std::exchange(added_ns_, now_ns).value_or(begun_ns_), .has_run = alike.has_value()};
  step.sections[Pace::kComputing].ns = computing_ns;
  step.sections[Pace::kBetween].ns = between_ns_;
  if (!window_) window_ = step;
  window_->join(step);
}

Pace PaceRecorder::take() {
  Pace pace = std::exchange(window_, std::nullopt).value_or(Pace{});
  const bool is_alike = std::exchange(is_alike_, true);
  for (size_t s = 0; s < best_ns_.size(); ++s) {
    Pace::Time& time = pace.sections[s];
    if (!is_alike || time.ns <= 0) continue;
    best_ns_[s] = best_ns_[s] == 0 ? time.ns : std::min(best_ns_[s], time.ns);
    time.slowdown = static_cast<double>(time.ns) / static_cast<double>(best_ns_[s]);
  }
  pace.process = process_;
  return pace;
}

std::vector<std::string> Stragglers::end_window(const std::vector<Pace>& paces, int64_t now_ns) {
  if (paces_.empty()) paces_ = paces;
  for (size_t r = 0; r < paces.size(); ++r) paces_[r].join(paces[r]);
  if (now_ns - begun_ns_ < kSpanNs) return {};
  begun_ns_ = now_ns;
  std::vector<std::string> lines = end_span();
  paces_.clear();
  return lines;
}

std::vector<std::string> Stragglers::end_span() {
  std::vector<std::string> lines;
  for (size_t r = 0; r < paces_.size(); ++r) {
    for (const Pace::Section section : {Pace::kComputing, Pace::kBetween}) {
      std::string text = line(r, section);
      State& state = states_[r][section];
      state.slow = text.empty() ? 0 : state.slow + 1;
      state.well = text.empty() ? state.well + 1 : 0;
      if (state.well >= state.needed) state.needed = kSpans;
      if (state.slow < state.needed) continue;
      state.needed *= 2;
      lines.push_back(std::move(text));
    }
  }
  return lines;
}

// Beside the ranks that do the same work in other replicas, and beside itself before, as far as others have not become
// slower as well: batches may have grown. The more remarkable of the two.
std::string Stragglers::line(size_t rank, Pace::Section section) const {
  const Pace& own = paces_[rank];
  const auto time = static_cast<double>(own.sections[section].ns);
  if (!own.has_run || time <= 0) return "";
  std::vector<double> twins, slowdowns;
  for (size_t r = 0; r < paces_.size(); ++r) {
    const Pace::Time& other = paces_[r].sections[section];
    if (r == rank || !paces_[r].has_run || other.ns <= 0) continue;
    slowdowns.push_back(other.slowdown);
    if (pipeline_ranks_[r] == pipeline_ranks_[rank]) twins.push_back(static_cast<double>(other.ns));
  }
  const double beside_twins = twins.empty() ? 1 : time / upper_median(twins);
  const double beside_itself = slowdowns.empty() ? 1 : own.sections[section].slowdown / upper_median(slowdowns);
  const double ratio = std::max(beside_twins, beside_itself);
  const auto period = static_cast<double>(own.period_ns);
  if (ratio < kSlow || time * (1 - 1 / ratio) < kMatters * period) return "";
  const std::string beside =
      beside_twins >= beside_itself ? "its like on other replicas" : "it did before, unlike other ranks";
  const std::string times = printed("%.1f", ratio) + " times as long as " + beside + ", and the others may wait for it. ";
  const std::string name = "straggler: rank " + std::to_string(rank) + " (" + own.process + ")";
  if (section == Pace::kComputing) {
    return name + " computes for " + in_seconds(time) + " in a step, " + times +
           "See what else runs on its host, how hot and how fast its processor is, and whether its batches are larger.";
  }
  return name + " takes " + in_seconds(time) + " from the end of a step to the next, " + times +
         "See what its program does there: load data, write, update weights.";
}

}  // namespace smp::engine
