// What the supervisor does with a program that it would wait for in vain. With mpirun: tests/mpi/supervisor_test.py.
#include "tools/supervise.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace smp::tools {
namespace {

constexpr std::chrono::seconds kGrace(1);

int code_of(const std::string& script, std::chrono::milliseconds stuck_limit) {
  return Supervisor(kGrace, stuck_limit).run({"sh", "-c", script});
}

TEST(SupervisorDeathTest, KillsAProgramThatFetchesNoStatusOfWhatItHasStarted) {
  EXPECT_EXIT(std::_Exit(code_of("true & exec sleep 1000", std::chrono::milliseconds(50))), testing::ExitedWithCode(137),
              "sh does not end though all that it has started has: killed");
}

TEST(SupervisorDeathTest, LeavesAProgramAloneWhileSomethingThatItHasStartedLives) {
  EXPECT_EXIT(std::_Exit(code_of("true & sleep 0.5 & exec sleep 0.4", std::chrono::milliseconds(50))),
              testing::ExitedWithCode(0), "^$");
}

}  // namespace
}  // namespace smp::tools
