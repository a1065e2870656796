// Owns the proof of launch detection, on environments that are maps.
#include "runtime/launch/launch.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <stdlib.h>

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

Environment of_mpirun(const std::string& rank, const std::string& size) {
  return {{"OMPI_COMM_WORLD_RANK", rank}, {"OMPI_COMM_WORLD_SIZE", size}};
}

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
}

// What MPI_Init of Open MPI 4.1 leaves in a process without launcher, and so mpi4py's import.
const Environment kSingleton{
    {"OMPI_MCA_ess", "singleton"}, {"OMPI_APP_CTX_NUM_PROCS", "1"}, {"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "396034049"}};

TEST(Launch, AProcessThatMpiFoundAloneIsAWorldOfOne) {
  EXPECT_EQ(detect_launch(in(kSingleton)), Launch());
  EXPECT_EQ(detect_launch(in(kSingleton + of_mpirun("1", "2"))).size, 2);  // mpirun started by such a process
  const Environment srun{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}};
  expect_contains(refusal_of(kSingleton + srun), "srun (SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=2)");  // each one alone
}

TEST(Launch, ReadsMpirun) {
  EXPECT_EQ(detect_launch(in(kMpirun)), (Launch{Launch::Kind::kMpirun, 3, 8, 1, 2}));
  EXPECT_EQ(detect_launch(in(of_mpirun("1", "4"))), (Launch{Launch::Kind::kMpirun, 1, 4, 1, 4}));
}

const Environment kTorchrun{{"RANK", "3"},
                            {"WORLD_SIZE", "8"},
                            {"LOCAL_RANK", "1"},
                            {"LOCAL_WORLD_SIZE", "2"},
                            {"MASTER_ADDR", "first.host"},
                            {"MASTER_PORT", "29500"}};

TEST(Launch, ReadsTorchrun) {
  Launch expected{Launch::Kind::kTorchrun, 3, 8, 1, 2, {"first.host", 29500}};
  EXPECT_EQ(detect_launch(in(kTorchrun)), expected);
  const Environment elastic{{"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  expected.store = {"first.host", 29500, true};
  EXPECT_EQ(detect_launch(in(kTorchrun + elastic)), expected);
  const Environment slurm{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}};  // torchrun on each of two hosts
  EXPECT_EQ(detect_launch(in(kTorchrun + slurm)).size, 8);
}

TEST(Launch, RefusesTorchrunsVariablesWithoutAPlaceToMeet) {
  Environment environment = kTorchrun;
  environment.erase("MASTER_ADDR");
  expect_contains(refusal_of(environment),
                  "expected MASTER_ADDR and MASTER_PORT beside RANK and WORLD_SIZE, got only MASTER_PORT");
  environment["MASTER_ADDR"] = "first.host";
  environment["MASTER_PORT"] = "70000";
  expect_contains(refusal_of(environment), "expected MASTER_PORT from 1 to 65535, got 70000");
  environment.erase("MASTER_PORT");
  expect_contains(refusal_of(environment), "got only MASTER_ADDR");
  environment.erase("MASTER_ADDR");
  expect_contains(refusal_of(environment), "got neither");
}

TEST(Launch, ReadsMpirunInsideASlurmAllocation) {
  const Environment slurm{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}};
  EXPECT_EQ(detect_launch(in(kMpirun + slurm)).size, 8);
}

Environment of_srun(const std::string& rank, const std::string& node, const std::string& counts) {
  return {{"SLURM_PROCID", rank}, {"SLURM_STEP_NUM_TASKS", "5"},         {"SLURM_LOCALID", "0"},
          {"SLURM_NODEID", node}, {"SLURM_STEP_TASKS_PER_NODE", counts}, {"PMIX_RANK", rank}};
}

TEST(Launch, ReadsAStepOfSrunThatMeetsOverPmix) {
  EXPECT_EQ(detect_launch(in(of_srun("2", "1", "2(x2),1"))), (Launch{Launch::Kind::kSrun, 2, 5, 0, 2}));
  EXPECT_EQ(detect_launch(in(of_srun("4", "2", "2(x2),1"))), (Launch{Launch::Kind::kSrun, 4, 5, 0, 1}));
  EXPECT_EQ(detect_launch(in(of_srun("0", "0", "5"))), (Launch{Launch::Kind::kSrun, 0, 5, 0, 5}));
  expect_contains(describe_mismatch(detect_launch(in(of_srun("0", "0", "5"))), 0, 1),
                  "(SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=5)");
}

TEST(Launch, TakesTorchrunThatSrunHasStartedOnEachNode) {
  EXPECT_EQ(detect_launch(in(kTorchrun + of_srun("0", "0", "1(x5)"))).kind, Launch::Kind::kTorchrun);
  const Environment alike{{"RANK", "2"}, {"WORLD_SIZE", "5"}, {"LOCAL_RANK", "0"}};  // of a script, for torch.distributed
  EXPECT_EQ(detect_launch(in(alike + of_srun("2", "1", "2(x2),1"))).kind, Launch::Kind::kSrun);
  const Environment alone{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}};
  expect_contains(refusal_of(alone + of_srun("2", "1", "2(x2),1")), "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=5 (srun)");
}

TEST(Launch, RefusesCountsOfSrunThatItCannotRead) {
  for (const char* counts : {"", "x", "2(", "2(x", "2(x2", "2(x2),", "2(x)", "2x2", "2(x2)1", "-2", "0", "2(x99999999999)"})
    expect_contains(refusal_of(of_srun("4", "2", counts)), "in SLURM_STEP_TASKS_PER_NODE as many tasks of each node");
}

TEST(Launch, TakesTwoLaunchersThatAgree) {
  const Environment torch{{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}};
  EXPECT_EQ(detect_launch(in(kMpirun + torch)).kind, Launch::Kind::kMpirun);
  const Environment of_hosts{{"RANK", "1"}, {"WORLD_SIZE", "2"}};  // Volcano's, of a host each
  EXPECT_EQ(detect_launch(in(kMpirun + of_hosts)).kind, Launch::Kind::kMpirun);
}

TEST(Launch, RefusesTwoLaunchersThatDisagreeAndPrintsBoth) {
  const Environment torch{{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}};
  const std::string text = refusal_of(kMpirun + torch);
  expect_contains(text, "OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=8 (Open MPI's mpirun)");
  expect_contains(text, "RANK=0, WORLD_SIZE=4 (torchrun)");
}

TEST(Launch, RefusesLaunchersThatItCannotServeAndSaysWhatWorks) {
  const std::pair<Environment, std::string> cases[] = {
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "torchrun (RANK=0, WORLD_SIZE=2)"},
      {{{"WORLD_SIZE", "2"}}, "torchrun (WORLD_SIZE=2)"},
      {{{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}}, "torchrun (LOCAL_RANK=0, LOCAL_WORLD_SIZE=2)"},
      {{{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}}, "srun (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4)"},
      {{{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}}, "srun (SLURM_PROCID=3)"},
      {{{"MV2_COMM_WORLD_RANK", "0"}, {"MV2_COMM_WORLD_SIZE", "2"}},
       "MVAPICH (MV2_COMM_WORLD_RANK=0, MV2_COMM_WORLD_SIZE=2)"},
      {{{"MVP_COMM_WORLD_SIZE", "2"}}, "MVAPICH (MVP_COMM_WORLD_SIZE=2)"},
      {{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}, "MPICH or Intel MPI (PMI_RANK=1, PMI_SIZE=4)"},
      {{{"PMI_RANK", "1"}}, "MPICH or Intel MPI (PMI_RANK=1)"},
      {{{"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}}, "MPICH or Intel MPI (MPI_LOCALRANKID=0, MPI_LOCALNRANKS=2)"},
      {{{"PALS_RANKID", "0"}, {"PALS_LOCAL_SIZE", "2"}}, "PALS (PALS_RANKID=0, PALS_LOCAL_SIZE=2)"},
      {{{"PMIX_RANK", "1"}}, "PMIX_RANK=1"},
      {{{"PMIX_RANK", "0"}}, "PMIX_RANK=0"}};
  for (const auto& [environment, name] : cases) {
    expect_contains(refusal_of(environment), name);
    expect_contains(refusal_of(environment), "`smp run -np N program`");
  }
}

TEST(Launch, TakesOtherLaunchersWithOneProcess) {
  for (const Environment& alone :
       {Environment{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}},
        Environment{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}},
        Environment{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"PMIX_RANK", "0"}},
        Environment{{"MV2_COMM_WORLD_RANK", "0"}, {"MV2_COMM_WORLD_SIZE", "1"}},
        Environment{{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}}}) {
    EXPECT_EQ(detect_launch(in(alone)), Launch());
  }
}

TEST(Launch, ComplainsOfVariablesThatNobodysMpirunHasSet) {
  const Launch two = detect_launch(in(of_mpirun("0", "2")));
  EXPECT_EQ(describe_mismatch(two, 0, 2), "");
  const std::string alone = describe_mismatch(two, 0, 1);
  expect_contains(alone, "find rank 0 of 2 (OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2), got rank 0 of 1");
  expect_contains(alone, "`smp run -np N program`");
  expect_contains(describe_mismatch(detect_launch(in(kMpirun)), 2, 8), "OMPI_COMM_WORLD_RANK=3");
}

TEST(Launch, RefusesIncompleteAndImpossibleSets) {
  expect_contains(refusal_of({{"OMPI_COMM_WORLD_RANK", "1"}}), "got only OMPI_COMM_WORLD_RANK");
  expect_contains(refusal_of(of_mpirun("one", "2")), "got 'one'");
  expect_contains(refusal_of(of_mpirun("2", "2")), "got OMPI_COMM_WORLD_RANK=2");
  expect_contains(refusal_of(of_mpirun("-1", "2")), "got OMPI_COMM_WORLD_RANK=-1");
  expect_contains(refusal_of(of_mpirun("1", "2") + Environment{{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}}),
                  "got OMPI_COMM_WORLD_LOCAL_RANK=2");
  expect_contains(refusal_of(of_mpirun("", "2")), "got ''");
}

TEST(Launch, SetsMpiDefaultsButKeepsTheUsers) {
  setenv("OMPI_MCA_btl_vader_eager_limit", "4096", 1);
  unsetenv("OMPI_MCA_pml");
  unsetenv("OMPI_MCA_btl");
  set_mpi_defaults({.size = 4, .local_size = 4});
  EXPECT_EQ(process_environment("OMPI_MCA_btl_vader_eager_limit"), "4096");
  EXPECT_EQ(process_environment("OMPI_MCA_pml"), "ob1");
  EXPECT_EQ(process_environment("OMPI_MCA_btl_vader_single_copy_mechanism"), "none");
  EXPECT_EQ(process_environment("OMPI_MCA_btl"), "self,vader");
  unsetenv("OMPI_MCA_btl");
  set_mpi_defaults({.size = 4, .local_size = 2});
  EXPECT_EQ(process_environment("OMPI_MCA_btl"), "self,vader,tcp");
}

}  // namespace
}  // namespace smp::runtime
