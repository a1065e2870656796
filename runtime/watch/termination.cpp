// Owns the handlers of SIGTERM and SIGUSR1.
#include "runtime/watch/termination.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <mutex>

namespace smp::runtime {
namespace {

std::mutex install_mutex;
int num_watches = 0;
struct sigaction earlier_handler{};       // of SIGTERM
struct sigaction earlier_stop_handler{};  // of SIGUSR1
std::atomic<bool> is_requested = false;
std::atomic<bool> is_stop_expected = false;
std::atomic<bool> has_stop_come = false;
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may not lock");

void hand_on(const struct sigaction& earlier, int signal, siginfo_t* info, void* context) {
  if ((earlier.sa_flags & SA_SIGINFO) != 0)
    earlier.sa_sigaction(signal, info, context);
  else if (earlier.sa_handler != SIG_DFL && earlier.sa_handler != SIG_IGN)
    earlier.sa_handler(signal);
}

void note_termination(int signal, siginfo_t* info, void* context) {
  is_requested.store(true, std::memory_order_relaxed);
  hand_on(earlier_handler, signal, info, context);
}

void note_stop(int signal, siginfo_t* info, void* context) {
  if (!is_stop_expected.load(std::memory_order_relaxed)) {
    raise(SIGTERM);
    return;
  }
  has_stop_come.store(true, std::memory_order_relaxed);
  hand_on(earlier_stop_handler, signal, info, context);
}

bool is_default(const struct sigaction& handler) {
  return (handler.sa_flags & SA_SIGINFO) == 0 && handler.sa_handler == SIG_DFL;
}

bool is_ours(const struct sigaction& handler) {
  return (handler.sa_flags & SA_SIGINFO) != 0 && handler.sa_sigaction == note_stop;
}

void handle(int signal, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction ours{};
  ours.sa_sigaction = handler;
  ours.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(signal, &ours, nullptr);
}

// A fork is no rank: who ends it with SIGTERM, as multiprocessing does its workers, waits until it has ended.
void watch_no_more() {
  if (num_watches == 0) return;
  is_requested = false;
  sigaction(SIGTERM, &earlier_handler, nullptr);
  struct sigaction present{};
  sigaction(SIGUSR1, nullptr, &present);
  if (!is_ours(present)) return;
  struct sigaction nothing = earlier_stop_handler;
  if (is_default(nothing)) nothing.sa_handler = SIG_IGN;  // mpirun asks all processes of a rank's group to stop
  sigaction(SIGUSR1, &nothing, nullptr);
}

}  // namespace

TerminationWatch::TerminationWatch() {
  const std::lock_guard lock(install_mutex);
  [[maybe_unused]] static const int forks = pthread_atfork(nullptr, nullptr, watch_no_more);
  if (num_watches++ > 0) return;
  sigaction(SIGTERM, nullptr, &earlier_handler);
  handle(SIGTERM, note_termination);
  struct sigaction present{};
  sigaction(SIGUSR1, nullptr, &present);
  if (is_default(present)) handle(SIGUSR1, note_stop);
}

TerminationWatch::~TerminationWatch() {
  const std::lock_guard lock(install_mutex);
  if (--num_watches > 0) return;
  sigaction(SIGTERM, &earlier_handler, nullptr);
  if (is_requested.exchange(false) && is_default(earlier_handler)) raise(SIGTERM);
}

bool is_termination_requested() noexcept { return is_requested.load(std::memory_order_relaxed); }
void expect_stop_signals() {
  const std::lock_guard lock(install_mutex);
  if (is_stop_expected.exchange(true)) return;
  struct sigaction present{};
  sigaction(SIGUSR1, nullptr, &present);
  if (is_ours(present)) return;
  earlier_stop_handler = present;
  handle(SIGUSR1, note_stop);
}

bool is_stop_signalled() noexcept { return has_stop_come.load(std::memory_order_relaxed); }

void acknowledge_termination() noexcept { is_requested.store(false, std::memory_order_relaxed); }

}  // namespace smp::runtime
