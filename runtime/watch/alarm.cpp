// Owns the thread that waits, and what it does then.
#include "runtime/watch/alarm.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/watch/exit_code.h"
#include "runtime/watch/wait_limit.h"

namespace smp::runtime {

constexpr std::chrono::milliseconds kAlarmInterval{500};

Alarm::Alarm(std::chrono::milliseconds limit, std::function<void()> late)
    : thread_([this, limit, act = std::move(late)] { wait(limit, act); }) {}

Alarm::~Alarm() {
  {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
  }
  ended_.notify_one();
  thread_.join();
}

void Alarm::wait(std::chrono::milliseconds limit, const std::function<void()>& late) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  for (WaitLimit waiting; !waiting.is_over(std::chrono::steady_clock::now() - start, limit);)
    if (ended_.wait_for(lock, std::min(limit, kAlarmInterval), [this] { return has_ended_; })) return;
  late();
}

std::function<void()> saying(std::string line) {
  return [text = std::move(line) + "\n"] {
    [[maybe_unused]] const ssize_t num_written = write(STDERR_FILENO, text.data(), text.size());
  };
}

std::function<void()> ending_with(std::string line) {
  return [say = saying(std::move(line))] {
    say();
    _exit(static_cast<int>(ExitCode::kHang));
  };
}

}  // namespace smp::runtime
