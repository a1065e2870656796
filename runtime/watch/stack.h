// Owns where a rank is in its code, asked from outside: by a signal, which it answers in an endless loop too.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace smp::runtime {

/// From now on the thread of the first call in a process answers SIGURG, which others pass over; its forks do not. Nothing
/// happens where the program has a handler of its own, or the system has no file for the answers.
/// add: installs a handler of the signal that writes to `file` as Python's faulthandler does, which counts in place of
/// native functions.
void answer_with_stack(const std::function<void(int file)>& add = {});

/// A question to one process of this user, host and pid namespace.
class StackQuestion {
 public:
  /// Asks; a process that has not called answer_with_stack() is left alone.
  explicit StackQuestion(pid_t pid);

  /// The functions that the rank is in, the inmost first: "name in library", "name at file:line", or "program+0x12" where
  /// the function has no exported name. Empty where it cannot be asked; nothing before it has answered.
  std::optional<std::vector<std::string>> answer() const;

 private:
  std::filesystem::path path_;  // empty: it cannot be asked
  uintmax_t begin_ = 0;         // of its answer
};

}  // namespace smp::runtime
