// Owns the end of a process that waits for too long in code that cannot be asked to stop.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace smp::runtime {

/// Ends the process with ExitCode::kHang and `line` on stderr, unless it is destroyed within `limit`.
class Deadline {
 public:
  Deadline(std::chrono::milliseconds limit, std::string line);
  ~Deadline();
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  void wait(std::chrono::milliseconds limit, const std::string& line);

  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
  std::thread thread_;
};

}  // namespace smp::runtime
