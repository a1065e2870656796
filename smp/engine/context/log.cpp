// The prefix of a log line, and one write for each message.
#include "smp/engine/context/log.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <utility>

namespace smp::engine {
namespace {

// The compiler knows the path on the machine that built us; readers want the one in the source tree.
std::string_view path_in_tree(std::string_view path) {
  const size_t folder = path.rfind("/smp/");
  if (folder != std::string_view::npos) return path.substr(folder + 1);
  if (path.starts_with("smp/")) return path;
  const size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

std::string time_text(std::chrono::system_clock::time_point time) {
  using std::chrono::floor;
  const auto second = floor<std::chrono::seconds>(time);
  const auto rest = floor<std::chrono::milliseconds>(time - second);
  const std::time_t clock = std::chrono::system_clock::to_time_t(second);
  std::tm local{};
  localtime_r(&clock, &local);
  char date[32], text[48];
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S", &local);
  std::snprintf(text, sizeof text, "%s.%03d", date, static_cast<int>(rest.count()));
  return text;
}

LogSink& process_sink() {
  static LogSink sink;
  return sink;
}

}  // namespace

void set_log_sink(LogSink sink) { process_sink() = std::move(sink); }

std::string log_line(LogLevel severity, std::chrono::system_clock::time_point time, const std::source_location& where,
                     std::string_view message) {
  std::string line("[");
  line.append(time_text(time)).append(severity == LogLevel::kInfo ? ": I " : ": W ");
  line.append(path_in_tree(where.file_name())).append(":").append(std::to_string(where.line()));
  return line.append("] ").append(message).append("\n");
}

void Logger::info(std::string_view message, const std::source_location& where) const {
  write(LogLevel::kInfo, message, where);
}

void Logger::warning(std::string_view message, const std::source_location& where) const {
  write(LogLevel::kWarning, message, where);
}

void Logger::write(LogLevel severity, std::string_view message, const std::source_location& where) const {
  if (severity < level_) return;
  if (file_descriptor_ == kStderr && process_sink()) {
    return process_sink()(severity, message, path_in_tree(where.file_name()), static_cast<int>(where.line()));
  }
  const std::string line = log_line(severity, std::chrono::system_clock::now(), where, message);
  // A pipe may take a long message in parts.  A reader that is gone is no reason to end training.
  for (size_t written = 0; written < line.size();) {
    const ssize_t count = ::write(file_descriptor_, line.data() + written, line.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return;
    written += static_cast<size_t>(count);
  }
}

}  // namespace smp::engine
