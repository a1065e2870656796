// Owns the proof of launch detection, on environments that are maps.
#include "runtime/launch/cross_memory.h"
#include "runtime/launch/launch.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cerrno>
#include <map>
#include <string>

namespace smp::runtime {
namespace {

using Environment = std::map<std::string, std::string>;

EnvironmentLookup in(const Environment& environment) {
  return [environment](const char* name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  };
}

Environment operator+(Environment a, const Environment& b) {
  a.insert(b.begin(), b.end());
  return a;
}

const Environment kMpirun{{"OMPI_COMM_WORLD_RANK", "3"},
                          {"OMPI_COMM_WORLD_SIZE", "8"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                          {"PMIX_RANK", "3"}};

std::string refusal_of(const Environment& environment) {
  try {
    detect_launch(in(environment));
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "not refused";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST(Launch, WithoutLauncherIsAWorldOfOne) {
  EXPECT_EQ(detect_launch(in({})), Launch());
  EXPECT_EQ(detect_launch(in({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}})), Launch());
  EXPECT_EQ(detect_launch(in({{"RANK", "1"}, {"WORLD_SIZE", "2"}})), Launch())
      << "per host, not per rank";
}

TEST(Launch, ReadsMpirun) {
  EXPECT_EQ(detect_launch(in(kMpirun)), (Launch{Launch::Kind::kMpirun, 3, 8, 1, 2}));
}

TEST(Launch, ReadsMpirunInsideASlurmAllocation) {
  const Environment slurm{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}};
  EXPECT_EQ(detect_launch(in(kMpirun + slurm)).size, 8);
}

TEST(Launch, ReadsExplicitVariables) {
  EXPECT_EQ(detect_launch(in({{"SMP_RANK", "1"}, {"SMP_WORLD_SIZE", "4"}})),
            (Launch{Launch::Kind::kExplicit, 1, 4, 1, 4}));
  EXPECT_EQ(detect_launch(in({{"SMP_RANK", "3"},
                              {"SMP_WORLD_SIZE", "4"},
                              {"SMP_LOCAL_RANK", "1"},
                              {"SMP_LOCAL_SIZE", "2"}})),
            (Launch{Launch::Kind::kExplicit, 3, 4, 1, 2}));
}

TEST(Launch, TakesTwoLaunchersThatAgree) {
  const Environment torch{{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}};
  EXPECT_EQ(detect_launch(in(kMpirun + torch)).kind, Launch::Kind::kMpirun);
  const Environment same{{"SMP_RANK", "3"}, {"SMP_WORLD_SIZE", "8"}};
  EXPECT_EQ(detect_launch(in(kMpirun + same)).kind, Launch::Kind::kMpirun);
}

TEST(Launch, RefusesTwoLaunchersThatDisagreeAndPrintsBoth) {
  const std::string text =
      refusal_of(kMpirun + Environment{{"SMP_RANK", "0"}, {"SMP_WORLD_SIZE", "2"}});
  expect_contains(text, "SMP_RANK=0, SMP_WORLD_SIZE=2");
  expect_contains(text, "OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=8");
  const Environment torch{{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}};
  expect_contains(refusal_of(kMpirun + torch), "RANK=0, WORLD_SIZE=4 (torchrun)");
}

TEST(Launch, RefusesLaunchersThatItCannotServeAndSaysWhatWorks) {
  const Environment torch{{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}};
  const Environment srun{{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"PMIX_RANK", "1"}};
  const Environment mpich{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}};
  const Environment pmix{{"PMIX_RANK", "1"}};
  for (const auto& [environment, name] :
       {std::pair{torch, "torchrun (RANK=1, WORLD_SIZE=4)"},
        std::pair{srun, "srun (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4)"},
        std::pair{mpich, "MPICH (PMI_RANK=1, PMI_SIZE=4)"}, std::pair{pmix, "PMIX_RANK=1"}}) {
    expect_contains(refusal_of(environment), name);
    expect_contains(refusal_of(environment), "`smp run -np N program`");
  }
}

TEST(Launch, TakesOtherLaunchersWithOneProcess) {
  EXPECT_EQ(detect_launch(in({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}})), Launch());
  EXPECT_EQ(detect_launch(in({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}})), Launch());
}

TEST(Launch, RefusesIncompleteAndImpossibleSets) {
  expect_contains(refusal_of({{"SMP_RANK", "1"}}), "got only SMP_RANK");
  expect_contains(refusal_of({{"SMP_RANK", "one"}, {"SMP_WORLD_SIZE", "2"}}), "got 'one'");
  expect_contains(refusal_of({{"SMP_RANK", "2"}, {"SMP_WORLD_SIZE", "2"}}), "got SMP_RANK=2");
  expect_contains(refusal_of({{"SMP_RANK", "-1"}, {"SMP_WORLD_SIZE", "2"}}), "got SMP_RANK=-1");
  expect_contains(refusal_of({{"SMP_RANK", "1"}, {"SMP_WORLD_SIZE", "2"}, {"SMP_LOCAL_RANK", "2"}}),
                  "got SMP_LOCAL_RANK=2");
  expect_contains(refusal_of({{"SMP_RANK", ""}, {"SMP_WORLD_SIZE", "2"}}), "got ''");
}

TEST(CrossMemory, IsTriedByChildrenThatAreGoneAfterwards) {
  const bool is_forbidden = is_cross_memory_forbidden();
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
  EXPECT_EQ(is_cross_memory_forbidden(), is_forbidden);
}

TEST(Launch, SetsMpiDefaultsButKeepsTheUsers) {
  setenv("OMPI_MCA_btl_vader_eager_limit", "4096", 1);
  unsetenv("OMPI_MCA_pml");
  set_mpi_defaults();
  EXPECT_EQ(process_environment("OMPI_MCA_btl_vader_eager_limit"), "4096");
  EXPECT_EQ(process_environment("OMPI_MCA_pml"), "ob1");
  const auto single_copy = process_environment("OMPI_MCA_btl_vader_single_copy_mechanism");
  EXPECT_EQ(single_copy, is_cross_memory_forbidden() ? std::optional<std::string>("none") : std::nullopt);
  EXPECT_EQ(process_environment("OMPI_MCA_btl"), "self,vader,tcp");
}

}  // namespace
}  // namespace smp::runtime
