// Owns how a rank ends that nobody catches: the others are told, and one line says why.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "runtime/transport/transport.h"
#include "runtime/watch/exit_code.h"

namespace smp::runtime {

/// what() of any exception, without the C++ backtrace that c10::Error adds.
std::string describe_exception(const std::exception_ptr& exception);

/// What fn() returns. What it throws ends the job before it goes on: the others wait for this rank, or soon will.
template <class Fn>
decltype(auto) or_end_the_job(Transport& world, const Fn& fn) {
  try {
    return fn();
  } catch (...) {
    world.abort(describe_exception(std::current_exception()));
    throw;
  }
}

/// What a process does with an exception that nobody handles, told by whoever catches it last; returns its exit code. Once:
/// a second thread that comes here waits for the process to end.
///
/// - A failure of this rank's own is sent to the others; when they have nothing more to print, this
///   rank prints one line, "[rank 2] <message>", behind what each rank was doing where it is a
///   HangError: its ExitCode.
/// - A failure that another rank has sent (AbortedError) is that rank's to print: silently
///   ExitCode::kPeerFailed, once that rank is gone, so that a launcher sees that one's code first.
/// - A peer that was killed cannot print, so every survivor does (PeerLostError): kPeerFailed.
int report_failure(const std::exception_ptr& exception);

/// From now on an exception that no C++ catches, on any thread of this process, is reported and ends it. The process has one
/// terminate handler, so the last call counts. `world` is not kept alive.
void install_terminate_handler(const std::shared_ptr<Transport>& world);

/// The same for a process that does not know the others yet, or has none: only the message and the exit code. Alone it
/// prints the message as it is.
void install_terminate_handler(int rank, bool is_alone = false);

}  // namespace smp::runtime
