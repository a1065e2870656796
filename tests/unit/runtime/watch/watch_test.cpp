// Owns the proof of runtime/watch within one process; failure_test.py has the rest, with real worlds.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/exchange/root_cause.h"
#include "runtime/transport/error.h"
#include "runtime/transport/loopback.h"
#include "runtime/watch/peer_processes.h"
#include "runtime/watch/stack.h"
#include "runtime/watch/termination.h"
#include "runtime/watch/wait_limit.h"

namespace smp::runtime {
namespace {

constexpr int kFailed = static_cast<int>(ExitCode::kFailed);
constexpr int kPeerFailed = static_cast<int>(ExitCode::kPeerFailed);

TEST(WaitLimit, CountsNoTimeInWhichTheProcessWasStopped) {
  using std::chrono::seconds;
  WaitLimit limit;
  int looks = 0;
  for (; !limit.is_over(std::chrono::milliseconds(500 * looks), seconds(10)); ++looks) continue;
  EXPECT_EQ(looks, 20);
  WaitLimit stopped;
  EXPECT_FALSE(stopped.is_over(seconds(1), seconds(10)));
  EXPECT_FALSE(stopped.is_over(seconds(3601), seconds(10)));  // one more
  EXPECT_FALSE(stopped.is_over(seconds(3608), seconds(10)));  // and another one
  for (int more = 1; more < 7; ++more) EXPECT_FALSE(stopped.is_over(seconds(3608 + more), seconds(10))) << more;
  EXPECT_TRUE(stopped.is_over(seconds(3615), seconds(10)));
}

TEST(PeerProcesses, KnowsThatThisProcessRuns) { EXPECT_TRUE(is_running(this_process())); }

TEST(PeerProcesses, SurvivesSerialising) {
  const ProcessIdentity me = this_process();
  const ProcessIdentity copy = ProcessIdentity::parse(me.serialised());
  EXPECT_EQ(copy.host, me.host);
  EXPECT_EQ(copy.boot, me.boot);
  EXPECT_EQ(copy.pid_namespace, me.pid_namespace);
  EXPECT_EQ(copy.pid, getpid());
  EXPECT_EQ(copy.start_ticks, me.start_ticks);
  EXPECT_THROW(ProcessIdentity::parse("host\nboot\nnamespace\n12"), c10::ValueError);
}

TEST(PeerProcesses, TakesAReusedPidForAnotherProcess) {
  ProcessIdentity earlier = this_process();
  earlier.start_ticks -= 1;
  EXPECT_FALSE(is_running(earlier));
}

TEST(PeerProcesses, CannotTellAcrossHostsAndPidNamespaces) {
  ProcessIdentity other = this_process();
  other.pid = 1 << 30;
  EXPECT_FALSE(is_running(other));
  other.host += "-other";
  EXPECT_TRUE(is_running(other));
  other = this_process();
  other.pid = 1 << 30;
  other.boot = "another machine of the same name";
  EXPECT_TRUE(is_running(other));
  other = this_process();
  other.pid = 1 << 30;
  other.pid_namespace = "pid:[1]";
  EXPECT_TRUE(is_running(other));
}

// A child that runs until `end` is closed. Its identity, before and after it has become a zombie.
TEST(PeerProcesses, NamesAZombieAndAnEndedProcess) {
  int end[2];
  ASSERT_EQ(pipe(end), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(end[1]);
    char byte = 0;
    _exit(static_cast<int>(read(end[0], &byte, 1)));
  }
  ProcessIdentity process = this_process();
  process.pid = child;
  // Started within the same tick, or later: try until the kernel's answer matches.
  while (!is_running(process)) ++process.start_ticks;
  const PeerProcesses peers(0, {this_process().serialised(), process.serialised()});
  EXPECT_EQ(peers.first_lost(), std::nullopt);
  EXPECT_TRUE(peers.is_rank_running(1));

  close(end[1]);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(peers.first_lost(), 1) << "a zombie";
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(peers.first_lost(), 1);
  EXPECT_FALSE(peers.is_rank_running(1));
  EXPECT_EQ(peers.name_of(1), "rank 1 (pid " + std::to_string(child) + " on host " + process.host + ")");
  close(end[0]);
}

// Of a child that runs `child` and then waits.
std::vector<std::string> stack_of_child(void (*child)()) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    child();
    close(ready[1]);
    for (;;) pause();
  }
  close(ready[1]);
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 0);
  close(ready[0]);
  const StackQuestion question(pid);
  std::optional<std::vector<std::string>> stack;
  while (!(stack = question.answer())) sched_yield();
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return *stack;
}

bool has_own_frame(const std::vector<std::string>& stack) {
  return std::any_of(stack.begin(), stack.end(),
                     [](const std::string& frame) { return frame.starts_with("watch_test+0x"); });
}

TEST(Stack, IsToldByAProcessThatAnswers) {
  EXPECT_TRUE(has_own_frame(stack_of_child([] { answer_with_stack(); })));
}

TEST(Stack, IsEmptyWhereNobodyAnswers) {
  EXPECT_TRUE(stack_of_child([] {}).empty());
  EXPECT_TRUE(stack_of_child([] {
                signal(SIGURG, [](int) {});  // the program's own
                answer_with_stack();
              }).empty());
}

TEST(Stack, OfAForkIsNotThatOfItsParent) {
  answer_with_stack();
  EXPECT_TRUE(stack_of_child([] {}).empty());
  EXPECT_TRUE(has_own_frame(stack_of_child([] { answer_with_stack(); })));
}

TEST(Stack, OfAScriptIsReadAsFaulthandlerWritesIt) {
  static int answers = -1;
  const std::vector<std::string> stack = stack_of_child([] {
    answer_with_stack([](int file) {
      answers = file;
      signal(SIGURG, [](int) {
        constexpr std::string_view kText =
            "Current thread 0x00007f (most recent call first):\n  File \"a, line 1 in b/train.py\", line 33 in forward\n";
        [[maybe_unused]] const ssize_t size = write(answers, kText.data(), kText.size());
      });
    });
  });
  EXPECT_EQ(stack, std::vector<std::string>{"forward at a, line 1 in b/train.py:33"});
}

int num_earlier_calls = 0;

TEST(TerminationWatch, NotesTheSignalAndHandsItToTheEarlierHandler) {
  const auto before = signal(SIGTERM, [](int) { ++num_earlier_calls; });
  {
    const TerminationWatch outer;
    const TerminationWatch inner;
    EXPECT_FALSE(is_termination_requested());
    raise(SIGTERM);
    EXPECT_TRUE(is_termination_requested());
    EXPECT_EQ(num_earlier_calls, 1);
    acknowledge_termination();
    EXPECT_FALSE(is_termination_requested());
  }
  raise(SIGTERM);
  EXPECT_EQ(num_earlier_calls, 2);
  EXPECT_FALSE(is_termination_requested());
  signal(SIGTERM, before);
}

TEST(TerminationWatchDeathTest, RaisesASignalThatNobodyAskedFor) {
  EXPECT_EXIT(
      {
        {
          const TerminationWatch watch;
          raise(SIGTERM);
        }
        _exit(0);
      },
      testing::KilledBySignal(SIGTERM), "");
}

TEST(TerminationWatchDeathTest, ForgetsAnAcknowledgedSignal) {
  EXPECT_EXIT(
      {
        {
          const TerminationWatch watch;
          raise(SIGTERM);
          acknowledge_termination();
        }
        _exit(0);
      },
      testing::ExitedWithCode(0), "");
}

TEST(TerminationWatchDeathTest, LeavesForksTheHandlerThatWasThereBefore) {
  EXPECT_EXIT(
      {
        const TerminationWatch watch;
        const pid_t child = fork();
        if (child == 0) {
          raise(SIGTERM);
          _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        _exit(WIFSIGNALED(status) ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

// As workers that load data: mpirun sends it to all processes of a rank's group.
TEST(TerminationWatchDeathTest, ForksPassOverRequestsToStop) {
  EXPECT_EXIT(
      {
        const TerminationWatch watch;
        const pid_t child = fork();
        if (child == 0) {
          raise(SIGUSR1);
          _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        _exit(WIFSIGNALED(status) ? 1 : 0);
      },
      testing::ExitedWithCode(0), "");
}

template <class Exception>
void throw_uncaught(const Exception& exception) {
  const LoopbackWorld world(2);
  const auto transport = world.transport(1);
  install_terminate_handler(transport);
  const auto fail = [&] { throw exception; };
  [&]() noexcept { fail(); }();
}

TEST(RootCauseDeathTest, PrintsOneLineForAFailureOfItsOwn) {
  EXPECT_EXIT(throw_uncaught(std::runtime_error("first\n  second\n")), testing::ExitedWithCode(kFailed),
              "^\\[rank 1\\] first second\n$");
}

TEST(RootCauseDeathTest, IsSilentAboutAFailureThatAnotherRankPrints) {
  EXPECT_EXIT(throw_uncaught(AbortedError(0, "first")), testing::ExitedWithCode(kPeerFailed), "^$");
}

TEST(RootCauseDeathTest, PrintsAFailureOfItsOwnThatWasCaughtAtFirst) {
  EXPECT_EXIT(throw_uncaught(AbortedError(1, "first")), testing::ExitedWithCode(kFailed),
              "^\\[rank 1\\] rank 1 failed: first\n$");
}

TEST(RootCauseDeathTest, PrintsOneLineBeforeThereIsAWorld) {
  const auto throw_error = [] { throw std::runtime_error("a setting\nis wrong"); };
  const auto fail = [&]() noexcept {
    install_terminate_handler(2);
    throw_error();
  };
  EXPECT_EXIT(fail(), testing::ExitedWithCode(kFailed), "^\\[rank 2\\] a setting is wrong\n$");
}

TEST(RootCauseDeathTest, PrintsTheTextAsItIsAndGivesItsCodeWithoutOthers) {
  const auto throw_error = [] { throw Coded(std::runtime_error("two\n  settings are wrong"), ExitCode::kUsage); };
  const auto fail = [&]() noexcept {
    install_terminate_handler(0, /*is_alone=*/true);
    throw_error();
  };
  EXPECT_EXIT(fail(), testing::ExitedWithCode(2), "^two\n  settings are wrong\n$");
}

TEST(RootCauseDeathTest, NamesAPeerThatCannotPrint) {
  EXPECT_EXIT(throw_uncaught(PeerLostError("rank 0 was killed")), testing::ExitedWithCode(kPeerFailed),
              "^\\[rank 1\\] rank 0 was killed\n$");
}

struct CannotTell : std::exception {
  const char* what() const noexcept override { std::terminate(); }
};

TEST(RootCauseDeathTest, EndsWhereTheReportFails) {
  EXPECT_EXIT(throw_uncaught(CannotTell()), testing::ExitedWithCode(kFailed),
              "^\\[rank 1\\] the report of a failure has failed itself\n$");
}

TEST(RootCause, DescribesExceptionsWithoutBacktrace) {
  const auto text_of = [](const auto& fn) {
    try {
      fn();
    } catch (...) {
      return describe_exception(std::current_exception());
    }
    return std::string();
  };
  EXPECT_EQ(text_of([] { throw std::runtime_error("plain"); }), "plain");
  EXPECT_EQ(text_of([] { TORCH_CHECK_VALUE(false, "checked"); }), "checked");
  EXPECT_EQ(text_of([] { throw 3; }), "an exception that is no std::exception");
}

}  // namespace
}  // namespace smp::runtime
