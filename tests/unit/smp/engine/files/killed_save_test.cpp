// A save that is killed at any of its system calls: the earlier state loads, or the new one.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <functional>
#include <set>

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

bool enters_a_call_that_changes_files(pid_t thread) {
  __ptrace_syscall_info call{};
  if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof call, &call) <= 0) return false;
  return call.op == PTRACE_SYSCALL_INFO_ENTRY && kChangesFiles.contains(call.entry.nr);
}

// Runs `work` in a child process that is killed when it is about to make the call `number` of the above, counted on all its
// threads from the SIGUSR1 on that `work` sends to itself. False: it made fewer calls and has ended well.
bool is_killed_at(int number, const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    try {
      at::set_num_threads(1);  // makes LibTorch's pool anew after a fork, one thread at a time
      work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
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
      EXPECT_TRUE(is_killed ? num_calls == number : WIFEXITED(status) && WEXITSTATUS(status) == 0);
      return is_killed;
    }
    const int signal = WSTOPSIG(status);
    counts = counts || signal == SIGUSR1;
    if (signal == kSyscall && counts && enters_a_call_that_changes_files(thread) && ++num_calls == number) {
      kill(child, SIGKILL);
    }
    const bool is_of_tracing = signal == kSyscall || signal == SIGTRAP || signal == SIGSTOP || signal == SIGUSR1;
    ptrace(PTRACE_SYSCALL, thread, nullptr, is_of_tracing ? 0L : static_cast<long>(signal));
  }
}

class KilledSave : public testing::Test {
 protected:
  using Net = torch::nn::LinearImpl;

  std::string folder() const { return folder_.path("save"); }

  // A state that is told from others by all its numbers and its text.
  void save(int number, int ranks, bool sends_signal = true) const {
    run_smp_ranks(ranks, {.pipeline_parallel_degree = ranks}, [&] {
      auto net = std::make_shared<Net>(3, 2);
      tests::fill(*net, static_cast<uint64_t>(number));
      DistributedModel<Net> model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), number), model);
      if (sends_signal && rank() == 0) raise(SIGUSR1);
      save_state(folder(), model, optimizer, {{"number", std::to_string(number)}});
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

  // Saves again and again in the folder that the last one has left, each killed one call later, until one is not.
  void expect_old_or_new(int ranks, int earlier) const {
    int num_found_new = 0;
    bool is_killed = true;
    int number = 0;
    while (is_killed && !HasFailure()) {
      ++number;
      SCOPED_TRACE("killed at call " + std::to_string(number));
      is_killed = is_killed_at(number, [&] { save(number, ranks); });
      const int found = loaded();
      EXPECT_TRUE(found == number || (is_killed && found == earlier)) << "found " << found << ", the earlier is " << earlier;
      num_found_new += is_killed && found == number;
      earlier = found;
    }
    EXPECT_GE(num_found_new, 2);  // the calls after the one that decides
    EXPECT_GE(number, 15);
    EXPECT_EQ(names_in(folder()), names_of_save(folder()));
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(KilledSave, LeavesNoStateOrItsOwnInANewFolder) { expect_old_or_new(1, 0); }

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
