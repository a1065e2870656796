// Hosts of the command line, and which of them answer. In place of ssh there is a script.
#include "tools/hosts.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <stdexcept>

#include "tests/unit/examples/temporary_folder.h"

namespace smp::tools {
namespace {

TEST(ParseHosts, ReadsNamesAndProcesses) {
  EXPECT_EQ(to_text(parse_hosts("a:4,b,10.0.0.7:16")), "a:4,b:1,10.0.0.7:16");
  EXPECT_EQ(num_processes_of(parse_hosts("a:4,b,10.0.0.7:16")), 21);
}

TEST(ParseHosts, RefusesWhatMpirunWouldReadOtherwise) {
  for (const char* text : {"", ",", "a:", "a:0", "a:-1", "a:4x", "a:4:2", ":4", "a,,b", "a:2,a:2", "-oProxyCommand=x:2"})
    EXPECT_THROW(parse_hosts(text), std::invalid_argument) << text;
}

class HostsThatAnswer : public testing::Test {
 protected:
  // Gets a host and a command.
  void set_remote_shell(const std::string& script) const {
    folder_.write("shell", "#!/bin/sh\n" + script);
    chmod(folder_.path("shell").c_str(), 0700);
    setenv("OMPI_MCA_plm_rsh_agent", (folder_.path("shell") + " -q : rsh").c_str(), 1);
  }
  ~HostsThatAnswer() override { unsetenv("OMPI_MCA_plm_rsh_agent"); }

  TemporaryFolder folder_;
};

TEST_F(HostsThatAnswer, AreThoseWhoseShellRuns) {
  set_remote_shell("[ \"$1\" = -q ] && [ \"$3\" = true ] && [ \"$2\" != b ]");
  EXPECT_EQ(to_text(hosts_that_answer(parse_hosts("a:1,b:2,c:3"), std::chrono::minutes(10))), "a:1,c:3");
}

TEST_F(HostsThatAnswer, DoNotIncludeThoseThatHang) {
  set_remote_shell("[ \"$2\" != b ] || exec tail -f /dev/null");
  EXPECT_EQ(to_text(hosts_that_answer(parse_hosts("b:2"), std::chrono::milliseconds(1))), "");
}

TEST_F(HostsThatAnswer, IncludeThisOneWithoutAShell) {
  set_remote_shell("exit 1");
  EXPECT_EQ(to_text(hosts_that_answer(parse_hosts("localhost:2,b:2"), std::chrono::minutes(10))), "localhost:2");
  setenv("OMPI_MCA_plm_rsh_agent", "/nonexistent", 1);
  EXPECT_EQ(to_text(hosts_that_answer(parse_hosts("localhost:2,b:2"), std::chrono::minutes(10))), "localhost:2");
}

}  // namespace
}  // namespace smp::tools
