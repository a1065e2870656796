// Owns the terminate handler and the last line of a failing rank.
#include "runtime/exchange/root_cause.h"

#include <c10/util/Exception.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "runtime/launch/launch.h"
#include "runtime/transport/error.h"

namespace smp::runtime {
namespace {

// A terminate handler takes no argument.
std::weak_ptr<Transport> failing_world;
int failing_rank = 0;
bool has_no_others = false;
std::atomic<bool> is_ending = false;

void flush_all() {
  std::cout.flush();
  std::fflush(nullptr);
}

// mpirun reads the terminals and pipes of its ranks in any order, but what it finds in them it
// prints at once: after this time, what was printed before has appeared.
void let_mpirun_print() {
  timespec moment{0, 100'000'000};
  while (nanosleep(&moment, &moment) != 0) continue;  // a SIGTERM cuts it short
}

// Line breaks, and blanks around them, become one blank.
std::string one_line(const std::string& message) {
  std::istringstream lines(message);
  std::string result;
  for (std::string line; std::getline(lines >> std::ws, line);) {
    line.erase(line.find_last_not_of(" \t\r") + 1);
    result += (result.empty() ? "" : " ") + line;
  }
  return result;
}

void print_lines(const std::vector<std::string>& messages) {
  flush_all();
  std::string lines;
  for (const std::string& message : messages) {
    lines += has_no_others ? message + "\n" : "[rank " + std::to_string(failing_rank) + "] " + one_line(message) + "\n";
  }
  // In one call where the system allows it, so that no other rank's line comes between.
  for (size_t done = 0; done < lines.size();) {
    const ssize_t num_written = write(STDERR_FILENO, lines.data() + done, lines.size() - done);
    if (num_written <= 0) return;
    done += static_cast<size_t>(num_written);
  }
}

// Where torchrun looks for the cause, which its summary shows. A front end that knows more has written it before.
void write_error_file(const std::string& message) noexcept {
  const std::optional<std::string> path = process_environment("TORCHELASTIC_ERROR_FILE");
  std::error_code error;
  if (!path || std::filesystem::exists(*path, error)) return;
  const boost::json::object extra{{"timestamp", std::to_string(std::time(nullptr))}};
  std::ofstream(*path) << boost::json::serialize(
      boost::json::object{{"message", boost::json::object{{"message", message}, {"extraInfo", extra}}}});
}

// Who failed first has the last word.
int report_own(const std::string& message, ExitCode code, std::vector<std::string> lines = {}) {
  write_error_file(message);
  flush_all();
  const auto world = failing_world.lock();
  const bool is_first = world == nullptr || world->abort(message);
  lines.push_back(message);
  if (!is_first) print_lines(lines);
  if (world != nullptr) world->end_in_order();
  if (is_first) {
    if (world != nullptr && world->size() > 1) let_mpirun_print();
    print_lines(lines);
    let_mpirun_print();  // it kills those who fail at the same time, once this rank has ended
  }
  return static_cast<int>(code);
}

int follow_peer() {
  flush_all();
  if (const auto world = failing_world.lock()) world->end_in_order();
  return static_cast<int>(ExitCode::kPeerFailed);
}

[[noreturn]] void end_world() {
  const int exit_code = report_failure(std::current_exception());
  flush_all();
  _exit(exit_code);
}

}  // namespace

std::string describe_exception(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

namespace {

int report(const std::exception_ptr& exception) {
  if (!exception) return report_own("the program failed without an exception", ExitCode::kFailed);
  try {
    std::rethrow_exception(exception);
  } catch (const AbortedError& error) {
    // Its own, where the program has caught the failure and gone on: then nobody else prints it.
    return error.failed_rank() == failing_rank ? report_own(error.what(), ExitCode::kFailed) : follow_peer();
  } catch (const PeerLostError& error) {
    print_lines({error.what()});
    return follow_peer();
  } catch (const HangError& error) {
    return report_own(error.what(), error.exit_code(), error.lines());
  } catch (...) {
    return report_own(describe_exception(exception), exit_code_of(exception));
  }
}

}  // namespace

int report_failure(const std::exception_ptr& exception) {
  thread_local std::optional<int> exit_code;  // what ends after it has been reported may fail too
  if (exit_code) return *exit_code;
  thread_local bool is_reporting = false;
  if (std::exchange(is_reporting, true)) {
    print_lines({"the report of a failure has failed itself"});
    return static_cast<int>(ExitCode::kFailed);
  }
  while (is_ending.exchange(true)) pause();  // another thread is at it
  exit_code = report(exception);
  return *exit_code;
}

void install_terminate_handler(const std::shared_ptr<Transport>& world) {
  failing_world = world;
  failing_rank = world->rank();
  has_no_others = world->size() == 1;
  std::set_terminate(end_world);
}

void install_terminate_handler(int rank, bool is_alone) {
  failing_world.reset();
  failing_rank = rank;
  has_no_others = is_alone;
  std::set_terminate(end_world);
}

}  // namespace smp::runtime
