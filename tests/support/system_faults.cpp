// Over ptrace.
#include "tests/support/system_faults.h"

#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <exception>
#include <set>
#include <stdexcept>
#include <string>

namespace smp::support {
namespace {

// What a kill leaves behind depends on how many of these came before it, and on nothing else.
const std::set<uint64_t> kChangesFiles = {
#ifdef SYS_open  // the older half, which some processors never had
    SYS_open,     SYS_creat,     SYS_mkdir,     SYS_rmdir,  SYS_rename,    SYS_link,      SYS_unlink,         SYS_symlink,
#endif
#ifdef SYS_renameat
    SYS_renameat,
#endif
    SYS_openat,   SYS_mkdirat,   SYS_renameat2, SYS_linkat, SYS_unlinkat,  SYS_symlinkat, SYS_write,          SYS_writev,
    SYS_pwrite64, SYS_ftruncate, SYS_fallocate, SYS_fsync,  SYS_fdatasync, SYS_sendfile,  SYS_copy_file_range};

// Whether a thread that has stopped is at the beginning of one of them.
bool enters_a_call_that_changes_files(pid_t thread) {
  __ptrace_syscall_info call{};
  if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof call, &call) <= 0) return false;
  return call.op == PTRACE_SYSCALL_INFO_ENTRY && kChangesFiles.contains(call.entry.nr);
}

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("trace_with_fault: expected ") + what);
}

#ifdef __x86_64__
// A thread at the beginning of a call, which the kernel then does not know, returns from it with `error`.
void refuse_call(pid_t thread, int error) {
  user_regs_struct registers{};
  ptrace(PTRACE_GETREGS, thread, nullptr, &registers);
  registers.orig_rax = static_cast<unsigned long long>(-1);
  ptrace(PTRACE_SETREGS, thread, nullptr, &registers);
  ptrace(PTRACE_SYSCALL, thread, nullptr, nullptr);
  expect(waitpid(thread, nullptr, __WALL) == thread, "a thread that enters its call");
  ptrace(PTRACE_GETREGS, thread, nullptr, &registers);
  registers.rax = static_cast<unsigned long long>(-error);
  ptrace(PTRACE_SETREGS, thread, nullptr, &registers);
}
#endif

}  // namespace

void let_parent_trace() {
  if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(1);
  raise(SIGSTOP);
}

Ended trace_with_fault(pid_t child, int number, int error) {
  int status = 0;
  expect(waitpid(child, &status, 0) == child && WIFSTOPPED(status), "a child that may be traced and has stopped");
  constexpr long kOptions = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
  expect(ptrace(PTRACE_SETOPTIONS, child, nullptr, kOptions) == 0, "the right to trace");
  ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
  constexpr int kSyscall = SIGTRAP | 0x80;
  int num_calls = 0;
  bool counts = false;
  for (;;) {
    const pid_t thread = waitpid(-1, &status, __WALL);
    if (!WIFSTOPPED(status)) {
      if (thread != child) continue;
      const bool is_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
      const bool has_come = num_calls >= number;
      expect(is_killed ? error == kKills && has_come : WIFEXITED(status), "an end by a kill that was asked for, or by exit");
      return {.has_come = has_come, .is_well = WIFEXITED(status) && WEXITSTATUS(status) == 0};
    }
    const int signal = WSTOPSIG(status);
    counts = counts || signal == SIGUSR1;
    if (signal == kSyscall && counts && enters_a_call_that_changes_files(thread) && ++num_calls == number) {
      if (error == kKills) kill(child, SIGKILL);
#ifdef __x86_64__
      if (error != kKills) refuse_call(thread, error);
#endif
    }
    const bool is_of_tracing = signal == kSyscall || signal == SIGTRAP || signal == SIGSTOP || signal == SIGUSR1;
    ptrace(PTRACE_SYSCALL, thread, nullptr, is_of_tracing ? 0L : static_cast<long>(signal));
  }
}

}  // namespace smp::support

void smp_let_parent_trace() { smp::support::let_parent_trace(); }

int smp_trace_with_fault(int child, int number, int error) {
  try {
    const smp::support::Ended ended = smp::support::trace_with_fault(child, number, error);
    return (ended.has_come ? 1 : 0) | (ended.is_well ? 2 : 0);
  } catch (const std::exception&) {
    return -1;
  }
}
