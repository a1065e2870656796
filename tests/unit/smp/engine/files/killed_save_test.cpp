// A save that is killed at any of its system calls, or to which the system refuses one: the earlier state loads, or the new
// one.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <functional>
#include <set>

#include "smp/save_series.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/saved_folder.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using tests::names_in;
using tests::names_of_save;
using tests::run_smp_ranks;

// What a kill leaves behind depends on how many of these came before it, and on nothing else.
const std::set<uint64_t> kChangesFiles = {
#ifdef SYS_open  // the older half, which some processors never had
    SYS_open,     SYS_creat,     SYS_mkdir,     SYS_rmdir,  SYS_rename,    SYS_link,      SYS_unlink,         SYS_symlink,
#endif
    SYS_openat,   SYS_mkdirat,   SYS_renameat2, SYS_linkat, SYS_unlinkat,  SYS_symlinkat, SYS_write,          SYS_writev,
    SYS_pwrite64, SYS_ftruncate, SYS_fallocate, SYS_fsync,  SYS_fdatasync, SYS_sendfile,  SYS_copy_file_range};

// Whether a thread that has stopped is at the beginning of one of them.
bool enters_a_call_that_changes_files(pid_t thread) {
  __ptrace_syscall_info call{};
  if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof call, &call) <= 0) return false;
  return call.op == PTRACE_SYSCALL_INFO_ENTRY && kChangesFiles.contains(call.entry.nr);
}

constexpr int kKills = 0;  // in place of an error of the system's

struct Ended {
  bool has_come = false;  // as many calls as were asked for
  bool is_well = false;   // with 0
};

#ifdef __x86_64__
// A thread at the beginning of a call, which the kernel then does not know, returns from it with `error`.
void refuse_call(pid_t thread, int error) {
  user_regs_struct registers{};
  ptrace(PTRACE_GETREGS, thread, nullptr, &registers);
  registers.orig_rax = static_cast<unsigned long long>(-1);
  ptrace(PTRACE_SETREGS, thread, nullptr, &registers);
  ptrace(PTRACE_SYSCALL, thread, nullptr, nullptr);
  EXPECT_EQ(waitpid(thread, nullptr, __WALL), thread);
  ptrace(PTRACE_GETREGS, thread, nullptr, &registers);
  registers.rax = static_cast<unsigned long long>(-error);
  ptrace(PTRACE_SETREGS, thread, nullptr, &registers);
}
#endif

// Runs `work` in a child process to which something happens when it is about to make the call `number` of the above, counted
// on all its threads from the SIGUSR1 on that `work` sends to itself: the call returns `error`, or the process is killed.
Ended run_with_fault(int number, int error, const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    try {
      at::set_num_threads(1);  // makes LibTorch's pool anew after a fork, one thread at a time
      work();
    } catch (const std::exception& failure) {
      if (error == kKills) std::fprintf(stderr, "%s\n", failure.what());
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  constexpr long kOptions = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
  EXPECT_EQ(ptrace(PTRACE_SETOPTIONS, child, nullptr, kOptions), 0);
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
      EXPECT_TRUE(is_killed ? error == kKills && has_come : WIFEXITED(status));
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

class KilledSave : public testing::Test {
 protected:
  using Net = torch::nn::LinearImpl;

  std::string folder() const { return folder_.path("step_1"); }

  // A state that is told from others by all its numbers and its text.
  void save(int number, int ranks, bool sends_signal = true) const {
    run_smp_ranks(ranks, {.pipeline_parallel_degree = ranks}, [&] {
      auto net = std::make_shared<Net>(3, 2);
      tests::fill(*net, static_cast<uint64_t>(number));
      DistributedModel<Net> model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), number), model);
      if (sends_signal && rank() == 0) raise(SIGUSR1);
      const UserContent user{{"number", std::to_string(number)}};
      if (!in_background_) return save_state(folder(), model, optimizer, user);
      SaveSeries saves(folder_.path(""));
      saves.save_in_background(1, model, optimizer, user);
      saves.finish();
    });
  }

  // The number of the state in the folder; 0 where it has none.
  int loaded() const {
    int number = 0;
    const auto load = [&] {
      auto net = std::make_shared<Net>(3, 2), want = std::make_shared<Net>(3, 2);
      DistributedModel<Net> model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.5), model);
      number = std::stoi(load_state(folder(), model, optimizer).at("number"));
      tests::fill(*want, static_cast<uint64_t>(number));
      support::expect_bit_equal(net->weight.detach(), want->weight.detach(), "weight");
      support::expect_bit_equal(net->bias.detach(), want->bias.detach(), "bias");
      EXPECT_EQ(optimizer.state_dict().groups[0].options.at("lr"), number);
    };
    const std::string refusal = support::message_of([&] { run_smp_ranks(1, {}, load); });
    EXPECT_TRUE(refusal.empty() || support::contains(refusal, "has no file state.json")) << refusal;
    return number;
  }

  // Saves again and again in the folder that the last one has left, each with a fault one call later, until none comes.
  void expect_old_or_new(int ranks, int earlier) const {
    constexpr std::array kErrors = {ENOSPC, EIO, EDQUOT};
    int num_found_new = 0;
    Ended ended{.has_come = true};
    int number = 0;
    while (ended.has_come && !HasFailure()) {
      ++number;
      const int error = is_refused_ ? kErrors[static_cast<size_t>(number) % kErrors.size()] : kKills;
      SCOPED_TRACE("call " + std::to_string(number) + ", error " + std::to_string(error));
      ended = run_with_fault(number, error, [&] { save(number, ranks); });
      EXPECT_TRUE(ended.has_come || ended.is_well);
      const int found = loaded();
      EXPECT_TRUE(found == number || (!ended.is_well && found == earlier))
          << "found " << found << ", the earlier is " << earlier;
      num_found_new += ended.has_come && found == number;
      earlier = found;
    }
    EXPECT_GE(num_found_new, 2);  // the calls after the one that decides
    EXPECT_GE(number, 15);
    EXPECT_EQ(names_in(folder()), names_of_save(folder()));
  }

  bool in_background_ = false;
  bool is_refused_ = false;  // the call, in place of a kill

 private:
  TemporaryFolder folder_;
};

TEST_F(KilledSave, LeavesNoStateOrItsOwnInANewFolder) { expect_old_or_new(1, 0); }

TEST_F(KilledSave, LeavesNoStateOrItsOwnInANewFolderOnTwoRanks) { expect_old_or_new(2, 0); }

TEST_F(KilledSave, LeavesNoStateOrItsOwnInTheBackground) {
  in_background_ = true;
  expect_old_or_new(2, 0);
}

#ifdef __x86_64__
TEST_F(KilledSave, LeavesTheOldStateOrItsOwnWhereTheDiskIsFullOrFails) {
  is_refused_ = true;
  expect_old_or_new(2, 0);
}

TEST_F(KilledSave, LeavesTheOldStateOrItsOwnWhereTheDiskIsFullOrFailsInTheBackground) {
  is_refused_ = in_background_ = true;
  expect_old_or_new(2, 0);
}
#endif

TEST_F(KilledSave, LeavesTheOldStateOrItsOwn) {
  save(999, 3, /*sends_signal=*/false);
  expect_old_or_new(1, 999);
}

TEST_F(KilledSave, LeavesTheOldStateOrItsOwnOnTwoRanks) {
  save(999, 2, /*sends_signal=*/false);
  expect_old_or_new(2, 999);
}

TEST_F(KilledSave, LeavesAStateWithoutAnIndexOrItsOwn) {
  save(999, 2, /*sends_signal=*/false);
  tests::remove_index(folder());
  expect_old_or_new(1, 999);
}

}  // namespace
}  // namespace smp
