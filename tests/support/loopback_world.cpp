// Owns the threads behind run_ranks.
#include "tests/support/loopback_world.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <thread>
#include <vector>

namespace smp::tests {

std::string message_of(const std::exception_ptr& exception) {
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

void run_ranks(int num_ranks, const std::function<void(runtime::Transport&)>& fn,
               std::chrono::milliseconds timeout) {
  runtime::LoopbackWorld world(num_ranks, timeout);
  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int rank) {
    const auto transport = world.transport(rank);
    try {
      fn(*transport);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      transport->abort(message_of(std::current_exception()));
    }
    world.leave(rank);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
  world.close();
}

}  // namespace smp::tests
