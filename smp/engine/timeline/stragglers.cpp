// Who is compared with whom, and from where on it counts.
#include "smp/engine/timeline/stragglers.h"

#include <algorithm>
#include <cstdio>
#include <tuple>
#include <utility>

#include "runtime/exchange/wire.h"
#include "runtime/watch/peer_processes.h"

namespace smp::engine {

namespace {

constexpr double kSlow = 1.5;      // times as long as others
constexpr double kMatters = 0.25;  // of the time from step to step is what the others wait for
constexpr int kSpans = 2;

auto fields_of(auto& pace) {
  return std::tie(pace.computing_ns, pace.step_ns, pace.between_ns, pace.slowdown, pace.process);
}

std::string printed(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string in_seconds(double ns) { return printed(ns < 1e8 ? "%.4f s" : "%.2f s", ns * 1e-9); }

// The lower one of two in the middle: half of the others at least take no longer. None: there are no others.
std::optional<double> lower_median(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  const auto middle = values.begin() + static_cast<ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::string encode(const Pace& pace) {
  runtime::WireWriter out;
  out.put(fields_of(pace));
  return out.take();
}

Pace decode_pace(std::string_view bytes) {
  return runtime::read_all(bytes, "pace", [](runtime::WireReader& in) {
    Pace pace;
    in.get_into(fields_of(pace));
    return pace;
  });
}

void Pace::join(const Pace& other) {
  computing_ns = std::min(computing_ns, other.computing_ns);
  step_ns = std::min(step_ns, other.step_ns);
  between_ns = std::min(between_ns, other.between_ns);
  slowdown = std::min(slowdown, other.slowdown);
}

PaceRecorder::PaceRecorder() : process_(runtime::this_process().text()) {}

void PaceRecorder::begin_step(int64_t now_ns) {
  begun_ns_ = now_ns;
  between_ns_ = ended_ns_ ? now_ns - *ended_ns_ : 0;
}

void PaceRecorder::add(int64_t computing_ns, uint64_t alike, int64_t now_ns) {
  if (std::exchange(alike_, alike) != alike) {
    is_alike_ = false;
    best_ns_ = 0;
  }
  const Pace step{.computing_ns = computing_ns, .step_ns = now_ns - begun_ns_, .between_ns = between_ns_};
  if (!window_) window_ = step;
  window_->join(step);
}

Pace PaceRecorder::take() {
  Pace pace = std::exchange(window_, std::nullopt).value_or(Pace{});
  if (std::exchange(is_alike_, true) && pace.computing_ns > 0) {
    best_ns_ = best_ns_ == 0 ? pace.computing_ns : std::min(best_ns_, pace.computing_ns);
    pace.slowdown = static_cast<double>(pace.computing_ns) / static_cast<double>(best_ns_);
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
    for (const Section section : {kComputing, kBetween}) {
      std::string line = section == kComputing ? computing(r) : between(r);
      int& spans = spans_[r][section];
      spans = line.empty() ? 0 : spans + 1;
      if (spans == kSpans) lines.push_back(std::move(line));
    }
  }
  return lines;
}

std::string Stragglers::name_of(size_t rank) const {
  return "rank " + std::to_string(rank) + " (" + paces_[rank].process + ")";
}

// Beside the ranks that do the same work in other replicas, or, where they are not slower than those or there are none,
// beside itself before, as far as others have not become slower as well: batches may have grown.
std::string Stragglers::computing(size_t rank) const {
  const Pace& own = paces_[rank];
  if (own.computing_ns == 0) return "";
  std::vector<double> twins, slowdowns;
  for (size_t r = 0; r < paces_.size(); ++r) {
    if (r == rank || paces_[r].computing_ns == 0) continue;
    slowdowns.push_back(paces_[r].slowdown);
    if (pipeline_ranks_[r] == pipeline_ranks_[rank]) twins.push_back(static_cast<double>(paces_[r].computing_ns));
  }
  const auto computing = static_cast<double>(own.computing_ns);
  const auto twin = lower_median(twins), slowdown = lower_median(slowdowns);
  const double beside_twins = twin ? computing / *twin : 1;
  const double beside_itself = slowdown ? own.slowdown / std::max(*slowdown, 1.0) : 1;
  const double ratio = std::max(beside_twins, beside_itself);
  const auto period = static_cast<double>(own.step_ns + own.between_ns);
  if (ratio < kSlow || computing * (1 - 1 / ratio) < kMatters * period) return "";
  return "straggler: " + name_of(rank) + " computes for " + in_seconds(computing) + " in each step, " +
         printed("%.1f", ratio) + " times as long as " +
         (beside_twins >= beside_itself ? "the same stages take on other replicas" : "it did before, unlike other ranks") +
         ", and the others wait for it. See what else runs on its host, and how hot and how fast its processor is, or "
         "whether its batches are larger.";
}

std::string Stragglers::between(size_t rank) const {
  const Pace& own = paces_[rank];
  std::vector<double> others;
  for (size_t r = 0; r < paces_.size(); ++r) {
    if (r != rank) others.push_back(static_cast<double>(paces_[r].between_ns));
  }
  const auto other = lower_median(others);
  const auto mine = static_cast<double>(own.between_ns);
  const auto period = static_cast<double>(own.step_ns + own.between_ns);
  if (!other || mine < kSlow * *other || mine - *other < kMatters * period) return "";
  return "straggler: " + name_of(rank) + " spends " + in_seconds(mine) + " outside of smp between two steps, others " +
         in_seconds(*other) + ", and they wait for it. Let it load data ahead, as with more workers, or do less there.";
}

}  // namespace smp::engine
