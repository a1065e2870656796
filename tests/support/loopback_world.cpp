// Owns the threads behind run_ranks.
#include "tests/support/loopback_world.h"

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/watch/root_cause.h"

namespace smp::tests {

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
      transport->abort(runtime::describe_exception(std::current_exception()));
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
