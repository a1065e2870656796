// Owns how a test runs N ranks: as N threads over a strict loopback.
#pragma once

#include <chrono>
#include <functional>

#include "runtime/transport/loopback.h"

namespace smp::tests {

/// Runs fn(transport) on `num_ranks` threads, one rank each, and returns when all have finished.
///
/// The first exception that is not an echo of another rank's ends the other ranks and is rethrown here; without one,
/// messages that nobody received are an error.
///
///   run_ranks(3, [](runtime::Transport& transport) { transport.barrier(); });
void run_ranks(int num_ranks, const std::function<void(runtime::Transport&)>& fn,
               std::chrono::milliseconds timeout = runtime::kDefaultTimeout);

}  // namespace smp::tests
