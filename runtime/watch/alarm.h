// Owns what happens where a wait in code that cannot be asked to stop takes too long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace smp::runtime {

/// Calls `late` on a thread of its own, unless it is destroyed within `limit`.
class Alarm {
 public:
  Alarm(std::chrono::milliseconds limit, std::function<void()> late);
  ~Alarm();
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

 private:
  void wait(std::chrono::milliseconds limit, const std::function<void()>& late);

  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
  std::thread thread_;
};

/// For an alarm: writes `line` to stderr.
std::function<void()> saying(std::string line);
/// And ends the process with ExitCode::kHang.
std::function<void()> ending_with(std::string line);

}  // namespace smp::runtime
