// The mpirun line that `smp run` builds, and what a shell makes of the line that it prints.
#include "tools/run.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace smp::tools {
namespace {

constexpr Machine kTwoCores = {.is_root = false, .num_cores = 2};

bool has(const Launch& launch, const std::vector<std::string>& words) {
  return std::search(launch.arguments.begin(), launch.arguments.end(), words.begin(), words.end()) != launch.arguments.end();
}

std::string output_of(const std::string& shell_line) {
  FILE* pipe = popen(shell_line.c_str(), "r");
  std::array<char, 256> buffer;
  std::string output;
  while (size_t num_bytes = fread(buffer.data(), 1, buffer.size(), pipe)) {
    output.append(buffer.data(), num_bytes);
  }
  pclose(pipe);
  return output;
}

TEST(PlanLaunch, IsTheWholeLine) {
  const auto launch = plan_launch({.num_processes = 2, .program = {"./train", "--lr", "0.1"}}, kTwoCores);
  EXPECT_EQ(launch.shell_line(),
            "OMP_NUM_THREADS=${OMP_NUM_THREADS-1} GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1} "
            "OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism-none} mpirun -np 2 "
            "--bind-to none --mca pml ob1 --mca btl self,vader --mca btl_vader_eager_limit 16384 "
            "--mca odls_base_signal_direct_children_only 1 --mca oob_tcp_if_include lo ./train --lr 0.1");
}

TEST(PlanLaunch, ReachesOtherHostsOverTheNetworkThatIsNamed) {
  setenv("SMP_CONFIG", "{}", 1);
  const auto launch =
      plan_launch({.num_processes = 8, .hosts = "a:4,b:4", .interface = "eth1", .program = {"a"}}, kTwoCores);
  unsetenv("SMP_CONFIG");
  EXPECT_TRUE(has(launch, {"--mca", "btl", "self,vader,tcp"}));
  EXPECT_TRUE(has(launch, {"--mca", "btl_tcp_if_include", "eth1", "--mca", "oob_tcp_if_include", "eth1"}));
  EXPECT_TRUE(has(launch, {"--host", "a:4,b:4"}));
  EXPECT_TRUE(has(launch, {"-x", "OMP_NUM_THREADS"}));
  EXPECT_TRUE(has(launch, {"-x", "SMP_CONFIG"}));
  EXPECT_FALSE(has(launch, {"--oversubscribe"}));
  EXPECT_TRUE(has(plan_launch({.host_file = "hosts", .program = {"a"}}, kTwoCores), {"--hostfile", "hosts"}));
}

TEST(PlanLaunch, CopiesLargeMessagesOnceWhereProcessesMayReadEachOthersMemory) {
  const auto line = plan_launch({.program = {"a"}}, {.allows_cross_memory = true}).shell_line();
  EXPECT_NE(line.find("${OMPI_MCA_btl_vader_single_copy_mechanism-cma}"), std::string::npos) << line;
}

TEST(PlanLaunch, OversubscribesOnlyBeyondTheCores) {
  EXPECT_FALSE(has(plan_launch({.num_processes = 2, .program = {"a"}}, kTwoCores), {"--oversubscribe"}));
  EXPECT_TRUE(has(plan_launch({.num_processes = 3, .program = {"a"}}, kTwoCores), {"--oversubscribe"}));
}

TEST(PlanLaunch, TimeoutIsPassedOnOnlyWhenGiven) {
  EXPECT_FALSE(has(plan_launch({.program = {"a"}}, kTwoCores), {"--timeout"}));
  EXPECT_TRUE(has(plan_launch({.timeout_s = 30, .program = {"a"}}, kTwoCores), {"--timeout", "30"}));
}

TEST(PlanLaunch, RootVariablesAreSetForRootOnly) {
  const auto user = plan_launch({.program = {"a"}}, {.is_root = false, .num_cores = 1});
  const auto root = plan_launch({.program = {"a"}}, {.is_root = true, .num_cores = 1});
  EXPECT_EQ(user.shell_line().find("ALLOW_RUN_AS_ROOT"), std::string::npos);
  EXPECT_NE(root.shell_line().find("OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"), std::string::npos);
}

TEST(ShellLine, SurvivesAShellWithEveryAwkwardArgument) {
  const Launch launch = {
      .environment = {},
      .arguments = {"printf", "[%s]", "a b", "it's", "$HOME;`id`", "", "\"x\"", "*", "~", "two\nlines", "#"}};
  EXPECT_EQ(output_of(launch.shell_line()), "[a b][it's][$HOME;`id`][][\"x\"][*][~][two\nlines][#]");
}

TEST(ShellLine, LeavesAVariableThatTheUserHasSet) {
  const Launch launch = {.environment = {{"SMP_TEST_A", "1", /*if_unset=*/true}}, .arguments = {"printenv", "SMP_TEST_A"}};
  EXPECT_EQ(output_of(launch.shell_line()), "1\n");
  EXPECT_EQ(output_of("export SMP_TEST_A=5; " + launch.shell_line()), "5\n");
}

TEST(ThisMachine, HasAtLeastOneCore) { EXPECT_GE(this_machine().num_cores, 1); }

// By a filter of system calls, as in a container; in a child, since it stays.
TEST(ThisMachine, SaysWhenProcessesMayNotReadEachOthersMemory) {
  const pid_t child = fork();
  if (child == 0) {
    sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
                            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program = {.len = std::size(filter), .filter = filter};
    const bool is_filtered =
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
    _exit(is_filtered && !this_machine().allows_cross_memory ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ThisMachine, LeavesNoChildBehind) {
  this_machine();
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(MemoryKills, AreThoseThatTheKernelCounts) {
  std::istringstream vmstat("nr_free_pages 5\ndrop_pagecache 0\noom_kill 3\nnuma_pte_updates 0\n"),
      other("nr_free_pages 5\n");
  EXPECT_EQ(num_memory_kills(vmstat), 3);
  EXPECT_EQ(num_memory_kills(other), 0);
}

}  // namespace
}  // namespace smp::tools
