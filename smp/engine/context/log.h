// Owns the form of a log line and how it reaches stderr. Whether a rank speaks at all is its caller's choice.
#pragma once

#include <chrono>
#include <functional>
#include <source_location>
#include <string>
#include <string_view>

#include "smp/config.h"

namespace smp::engine {

/// "[2024-05-01 13:45:06.789: W smp/engine/calls/job.cpp:42] message\n", in local time; "I" for LogLevel::kInfo.
std::string log_line(LogLevel severity, std::chrono::system_clock::time_point time, const std::source_location& where,
                     std::string_view message);

/// What takes a process's messages in place of stderr, for a language with a log of its own. `file` and `line`: who speaks.
using LogSink = std::function<void(LogLevel severity, std::string_view message, std::string_view file, int line)>;
/// Before smp::init; an empty one is stderr again.
void set_log_sink(LogSink sink);

/// Writes lines to a file descriptor, or to the sink in place of stderr. A message is written by one call, so lines of
/// threads and of processes that share stderr do not mix; a message of several lines stays together.
class Logger {
 public:
  static constexpr int kStderr = 2;

  /// Lines below `level` are dropped; kOff drops all.
  explicit Logger(LogLevel level = LogLevel::kInfo, int file_descriptor = kStderr)
      : level_(level), file_descriptor_(file_descriptor) {}

  void info(std::string_view message, const std::source_location& where = std::source_location::current()) const;
  void warning(std::string_view message, const std::source_location& where = std::source_location::current()) const;

 private:
  void write(LogLevel severity, std::string_view message, const std::source_location& where) const;

  LogLevel level_;
  int file_descriptor_;
};

}  // namespace smp::engine
