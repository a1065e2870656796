// Owns the threads behind run_ranks.
#include "tests/support/loopback_world.h"

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/exchange/root_cause.h"
#include "runtime/transport/error.h"

namespace smp::tests {
namespace {

bool is_of_another_rank(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const AbortedError&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

void run_ranks(int num_ranks, const std::function<void(runtime::Transport&)>& fn, std::chrono::milliseconds timeout) {
  runtime::LoopbackWorld world(num_ranks, timeout);
  std::mutex mutex;
  std::exception_ptr first, first_cause;  // a rank may hear of an error before the failed one has left its call
  const auto run = [&](int rank) {
    const auto transport = world.transport(rank);
    try {
      fn(*transport);
    } catch (...) {
      const std::lock_guard lock(mutex);
      const std::exception_ptr error = std::current_exception();
      if (!first) first = error;
      if (!first_cause && !is_of_another_rank(error)) first_cause = error;
      transport->abort(runtime::describe_exception(error));
    }
    world.leave(rank);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first_cause ? first_cause : first);
  world.close();
}

}  // namespace smp::tests
