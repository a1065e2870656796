// Owns the thread that ends the process.
#include "runtime/watch/deadline.h"

#include <unistd.h>

#include <utility>

#include "runtime/watch/exit_code.h"

namespace smp::runtime {

Deadline::Deadline(std::chrono::milliseconds limit, std::string line)
    : thread_([this, limit, text = std::move(line)] { wait(limit, text); }) {}

Deadline::~Deadline() {
  {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
  }
  ended_.notify_one();
  thread_.join();
}

void Deadline::wait(std::chrono::milliseconds limit, const std::string& line) {
  std::unique_lock lock(mutex_);
  if (ended_.wait_for(lock, limit, [this] { return has_ended_; })) return;
  const std::string text = line + "\n";
  [[maybe_unused]] const ssize_t num_written = write(STDERR_FILENO, text.data(), text.size());
  _exit(static_cast<int>(ExitCode::kHang));
}

}  // namespace smp::runtime
