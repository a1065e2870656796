// Finds ranks for which the others wait because they take longer than they should. Says so in lines of text; ends nothing.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/device/device.h"

namespace smp::engine {

/// What one rank took for some training steps: for the fastest of them, as every step is slow now and then.
struct Pace {
  int64_t computing_ns = 0;  // forwards and backwards of a step; 0: it ran none
  int64_t step_ns = 0;       // a step, with what it waits for
  int64_t between_ns = 0;    // from the end of a step to the next, where its program does something else
  double slowdown = 1;       // computing_ns over that of its fastest window of steps that were alike
  std::string process{};     // "pid 7 on host a"

  /// Of these steps and those.
  void join(const Pace& other);
};

std::string encode(const Pace& pace);
/// Throws std::runtime_error for bytes that are none.
Pace decode_pace(std::string_view bytes);

/// Takes the time of this rank, by the clock of its host: of a device that goes on by itself only what it is given to do.
class PaceRecorder {
 public:
  PaceRecorder();

  /// Of any step.
  void begin_step(int64_t now_ns = runtime::host().now_ns());
  void end_step(int64_t now_ns = runtime::host().now_ns()) { ended_ns_ = now_ns; }
  /// Of one that trains, within it. alike: the same number for steps of the same operators on the same shapes.
  void add(int64_t computing_ns, uint64_t alike, int64_t now_ns = runtime::host().now_ns());
  /// Of the steps since the last call; begins a window.
  Pace take();

 private:
  std::string process_;
  int64_t begun_ns_ = 0;
  std::optional<int64_t> ended_ns_;
  int64_t between_ns_ = 0;      // before the step in progress
  std::optional<Pace> window_;  // none: no step yet
  uint64_t alike_ = 0;          // of the last step
  bool is_alike_ = true;        // all steps of the window are, among each other and to those before
  int64_t best_ns_ = 0;         // computing_ns of such windows; 0: none yet
};

/// On the rank that speaks: compares all ranks.
class Stragglers {
 public:
  /// Training steps of a window. A straggler is one in two spans on end, each of a window, or of as many as take kSpanNs: it
  /// is told after 17 steps at most, or in 3 s.
  static constexpr uint64_t kWindow = 6;
  /// In less, ranks that share a processor are not slow at the same time.
  static constexpr int64_t kSpanNs = 1'000'000'000;

  /// pipeline_ranks: of the ranks of the world; those that have one in common do the same work.
  explicit Stragglers(std::vector<int> pipeline_ranks, int64_t now_ns = runtime::host().now_ns())
      : pipeline_ranks_(std::move(pipeline_ranks)), begun_ns_(now_ns), spans_(pipeline_ranks_.size()) {}

  /// A line for each rank that has become one. paces: of the ranks of the world.
  std::vector<std::string> end_window(const std::vector<Pace>& paces, int64_t now_ns = runtime::host().now_ns());

 private:
  enum Section { kComputing, kBetween, kNumSections };

  std::vector<std::string> end_span();
  std::string computing(size_t rank) const;
  std::string between(size_t rank) const;
  std::string name_of(size_t rank) const;

  std::vector<int> pipeline_ranks_;
  std::vector<Pace> paces_;  // of the span in progress; empty at its beginning
  int64_t begun_ns_;
  std::vector<std::array<int, kNumSections>> spans_;  // on end in which it was one, by rank
};

}  // namespace smp::engine
