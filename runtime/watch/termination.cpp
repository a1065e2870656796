// Owns the SIGTERM handler.
#include "runtime/watch/termination.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <mutex>

namespace smp::runtime {
namespace {

std::mutex install_mutex;
int num_watches = 0;
struct sigaction earlier_handler{};
std::atomic<bool> is_requested = false;
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may not lock");

void note_termination(int signal, siginfo_t* info, void* context) {
  is_requested.store(true, std::memory_order_relaxed);
  if ((earlier_handler.sa_flags & SA_SIGINFO) != 0)
    earlier_handler.sa_sigaction(signal, info, context);
  else if (earlier_handler.sa_handler != SIG_DFL && earlier_handler.sa_handler != SIG_IGN)
    earlier_handler.sa_handler(signal);
}

// A fork is no rank: who ends it with SIGTERM, as multiprocessing does its workers, waits until it has ended.
void watch_no_more() {
  if (num_watches == 0) return;
  is_requested = false;
  sigaction(SIGTERM, &earlier_handler, nullptr);
}

}  // namespace

TerminationWatch::TerminationWatch() {
  const std::lock_guard lock(install_mutex);
  [[maybe_unused]] static const int forks = pthread_atfork(nullptr, nullptr, watch_no_more);
  if (num_watches++ > 0) return;
  sigaction(SIGTERM, nullptr, &earlier_handler);
  struct sigaction ours{};
  ours.sa_sigaction = note_termination;
  ours.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGTERM, &ours, nullptr);
}

TerminationWatch::~TerminationWatch() {
  const std::lock_guard lock(install_mutex);
  if (--num_watches > 0) return;
  sigaction(SIGTERM, &earlier_handler, nullptr);
  const bool is_default = (earlier_handler.sa_flags & SA_SIGINFO) == 0 && earlier_handler.sa_handler == SIG_DFL;
  if (is_requested.exchange(false) && is_default) raise(SIGTERM);
}

bool is_termination_requested() noexcept { return is_requested.load(std::memory_order_relaxed); }
void acknowledge_termination() noexcept { is_requested.store(false, std::memory_order_relaxed); }

}  // namespace smp::runtime
