// Finds stragglers: ranks for which the others wait because they take longer than they should. Says so in lines of text;
// ends nothing.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/device/device.h"

namespace smp::engine {

/// What one rank took for some training steps: for the fastest of them, as every step is slow now and then.
struct Pace {
  enum Section { kComputing, kBetween, kNumSections };
  /// Of a section of a step.
  struct Time {
    int64_t ns = 0;       // 0: not known
    double slowdown = 1;  // over that of its fastest steps, as far as those were alike
  };

  // Forwards and backwards; and from the end of a step to the next, outside of calls that wait for other ranks.
  std::array<Time, kNumSections> sections{};
  int64_t period_ns = 0;  // from the end of one training step to the end of the next
  bool has_run = false;   // stages in each of these steps; a replica without a batch does not
  std::string process{};  // "pid 7 on host a"

  static auto members(auto& self) {
    auto& [computing, between] = self.sections;
    return std::tie(computing.ns, computing.slowdown, between.ns, between.slowdown, self.period_ns, self.has_run,
                    self.process);
  }
  /// Of these steps and those.
  void join(const Pace& other);
};

/// Takes the time of this rank, by the clock of its host.
class PaceRecorder {
 public:
  PaceRecorder();

  /// Of any step. in_calls_ns: how long this rank has been in calls with others so far.
  void begin_step(int64_t in_calls_ns, int64_t now_ns = runtime::host().now_ns());
  void end_step(int64_t in_calls_ns, int64_t now_ns = runtime::host().now_ns());
  /// Of one that trains, within it. computing_ns: 0 where it is not known. alike: the same number for steps of the same
  /// operators on the same shapes; none where it ran nothing.
  void add(int64_t computing_ns, std::optional<uint64_t> alike, int64_t now_ns = runtime::host().now_ns());
  /// Of the steps since the last call; begins a window.
  Pace take();

 private:
  std::string process_;
  int64_t begun_ns_ = 0;
  std::optional<int64_t> added_ns_;
  std::optional<int64_t> ended_ns_;                    // by a clock that stands still in calls
  int64_t between_ns_ = 0;                             // before the step in progress
  std::optional<Pace> window_;                         // none: no step yet
  std::optional<uint64_t> alike_;                      // of the last step
  bool is_alike_ = true;                               // all steps of the window are, among each other and to those before
  std::array<int64_t, Pace::kNumSections> best_ns_{};  // of such windows; 0: none yet
};

/// On the rank that speaks: compares all ranks.
class Stragglers {
 public:
  /// Training steps of a window. A straggler is one in two spans on end, each of as many windows as take kSpanNs.
  static constexpr uint64_t kWindow = 6;
  /// In less, ranks that share a processor are not slow at the same time.
  static constexpr int64_t kSpanNs = 1'000'000'000;

  /// pipeline_ranks: of the ranks of the world; those that have one in common do the same work.
  explicit Stragglers(std::vector<int> pipeline_ranks, int64_t now_ns = runtime::host().now_ns())
      : pipeline_ranks_(std::move(pipeline_ranks)), begun_ns_(now_ns), states_(pipeline_ranks_.size()) {}

  /// A line for each rank that has become one, and again when it has been one for twice as many spans, unless it has been
  /// well for as long meanwhile. paces: of the ranks of the world.
  std::vector<std::string> end_window(const std::vector<Pace>& paces, int64_t now_ns = runtime::host().now_ns());

 private:
  static constexpr int kSpans = 2;
  struct State {
    int slow = 0, well = 0;  // spans on end
    int needed = kSpans;     // for the next line
  };

  std::vector<std::string> end_span();
  std::string line(size_t rank, Pace::Section section) const;

  std::vector<int> pipeline_ranks_;
  std::vector<Pace> paces_;  // of the span in progress; empty at its beginning
  int64_t begun_ns_;
  std::vector<std::array<State, Pace::kNumSections>> states_;  // by rank
};

}  // namespace smp::engine
