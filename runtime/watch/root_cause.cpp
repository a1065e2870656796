// Owns the terminate handler and the last line of a failing rank.
#include "runtime/watch/root_cause.h"

#include <c10/util/Exception.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <iostream>
#include <sstream>

#include "runtime/transport/error.h"

namespace smp::runtime {
namespace {

// A terminate handler takes no argument.
std::weak_ptr<Transport> failing_world;
int failing_rank = 0;
std::atomic<bool> is_ending = false;

void flush_all() {
  std::cout.flush();
  std::fflush(nullptr);
}

// mpirun reads the terminals and pipes of its ranks in any order, but what it finds in them it
// prints at once: after this time, what was printed before has appeared.
void let_mpirun_print() {
  const timespec moment{0, 100'000'000};
  nanosleep(&moment, nullptr);
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

void print_line(const std::string& message) {
  flush_all();
  const std::string line =
      "[rank " + std::to_string(failing_rank) + "] " + one_line(message) + "\n";
  // In one call, so that no other rank's line comes between.
  [[maybe_unused]] const ssize_t num_written = write(STDERR_FILENO, line.data(), line.size());
}

[[noreturn]] void end_process(int exit_code) {
  flush_all();
  _exit(exit_code);
}

[[noreturn]] void end_world() {
  while (is_ending.exchange(true)) pause();  // another thread is at it
  const std::exception_ptr exception = std::current_exception();
  if (!exception) {
    print_line("std::terminate was called without an exception");
    end_process(kExitFailed);
  }
  try {
    std::rethrow_exception(exception);
  } catch (const AbortedError&) {
    end_process(kExitPeerFailed);
  } catch (const PeerLostError& error) {
    print_line(error.what());
    end_process(kExitPeerFailed);
  } catch (...) {
    const std::string message = describe_exception(exception);
    flush_all();
    if (const auto world = failing_world.lock()) {
      world->abort(message);
      if (world->size() > 1) let_mpirun_print();
    }
    print_line(message);
    end_process(kExitFailed);
  }
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

void install_terminate_handler(const std::shared_ptr<Transport>& world) {
  failing_world = world;
  failing_rank = world->rank();
  std::set_terminate(end_world);
}

}  // namespace smp::runtime
