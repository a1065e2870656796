// Owns the environment variables of the launchers.
#include "runtime/launch/launch.h"

#include <c10/util/Exception.h>
#include <stdlib.h>

#include <algorithm>
#include <charconv>
#include <string_view>

namespace smp::runtime {
namespace {

// The variables of one launcher, and what they said.
struct VariableSet {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

constexpr VariableSet kOpenMpi{"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
// A step of it; a batch script and an interactive shell have SLURM_NTASKS too.
constexpr VariableSet kSrun{"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr};
constexpr VariableSet kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};

// Launchers whose processes would each believe to be alone.
constexpr VariableSet kRefusedLaunchers[] = {
    kTorchrun,
    kSrun,
    {"MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},
    {"MVAPICH", "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_SIZE"},
    {"MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"PALS", "PALS_RANKID", nullptr, "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"}};

constexpr const char* kWhatWorks =
    "Several processes are started by Open MPI's mpirun: `smp run -np N program`, or `mpirun -np N program`, which inside a "
    "Slurm allocation needs no host list; by `srun --mpi=pmix program`; or by torchrun, which sets RANK, WORLD_SIZE, "
    "LOCAL_RANK, LOCAL_WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT. Unset the variables of a launcher that did not start this process: without one, a program "
    "is a world of one.";

std::optional<int> number(const EnvironmentLookup& lookup, const char* name) {
  const std::optional<std::string> text = lookup(name);
  if (!text) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  TORCH_CHECK_VALUE(error == std::errc() && end == text->data() + text->size(), "launch: expected ", name,
                    " to be a whole number, got '", *text, "'. Unset it or correct it.");
  return value;
}

void check_range(const VariableSet& set, const Launch& launch) {
  TORCH_CHECK_VALUE(launch.size >= 1 && launch.rank >= 0 && launch.rank < launch.size, "launch: expected 0 <= ", set.rank,
                    " < ", set.size, ", got ", set.rank, "=", launch.rank, " and ", set.size, "=", launch.size, ".");
  const char* local_size = set.local_size ? set.local_size : "the size";
  TORCH_CHECK_VALUE(launch.local_rank >= 0 && launch.local_rank < launch.local_size,
                    "launch: expected 0 <= ", set.local_rank, " < ", local_size, ", got ", set.local_rank, "=",
                    launch.local_rank, " and ", local_size, "=", launch.local_size, ".");
}

// What `set` says, or nothing when neither its rank nor its size is there.
std::optional<Launch> read(const EnvironmentLookup& lookup, const VariableSet& set, Launch::Kind kind) {
  const std::optional<int> rank = number(lookup, set.rank);
  const std::optional<int> size = number(lookup, set.size);
  if (!rank && !size) return std::nullopt;
  TORCH_CHECK_VALUE(rank && size, "launch: expected both ", set.rank, " and ", set.size, ", got only ",
                    rank ? set.rank : set.size, ". Set both or neither.");
  Launch launch{kind, *rank, *size, *rank, *size};
  if (const auto local_rank = number(lookup, set.local_rank)) launch.local_rank = *local_rank;
  const std::optional<int> local_size = set.local_size ? number(lookup, set.local_size) : std::nullopt;
  launch.local_size = local_size.value_or(launch.size);
  check_range(set, launch);
  return launch;
}

Launch::Store read_store(const EnvironmentLookup& lookup) {
  const std::optional<std::string> host = lookup("MASTER_ADDR");
  const std::optional<int> port = number(lookup, "MASTER_PORT");
  TORCH_CHECK_VALUE(
      host && port, "launch: expected MASTER_ADDR and MASTER_PORT beside RANK and WORLD_SIZE, got ",
      host   ? "only MASTER_ADDR"
      : port ? "only MASTER_PORT"
             : "neither",
      ". torchrun sets them; who starts processes otherwise gives the address of rank 0 and a free port of it.");
  TORCH_CHECK_VALUE(*port > 0 && *port < 65536, "launch: expected MASTER_PORT from 1 to 65535, got ", *port, ".");
  return {*host, *port, lookup("TORCHELASTIC_USE_AGENT_STORE") == "True"};
}

// How many tasks the node `node` has of those in "2(x3),1": 2 on each of three, and 1.
std::optional<int> tasks_on(int node, std::string_view counts) {
  while (!counts.empty()) {
    const std::string_view entry = counts.substr(0, counts.find(','));
    counts.remove_prefix(std::min(counts.size(), entry.size() + 1));
    int tasks = 0, nodes = 1;
    const char *const begin = entry.data(), *const end = begin + entry.size();
    auto read = std::from_chars(begin, end, tasks);
    if (read.ec != std::errc()) return std::nullopt;
    if (read.ptr != end) {
      const std::string_view times(read.ptr, static_cast<size_t>(end - read.ptr));
      if (!times.starts_with("(x") || !times.ends_with(")")) return std::nullopt;
      read = std::from_chars(read.ptr + 2, end - 1, nodes);
      if (read.ec != std::errc() || read.ptr != end - 1) return std::nullopt;
    }
    if (node < nodes) return tasks;
    node -= nodes;
  }
  return std::nullopt;
}

// A step of srun whose tasks find each other: PMIx is there.
std::optional<Launch> read_srun(const EnvironmentLookup& lookup) {
  if (!lookup("PMIX_RANK") || number(lookup, kSrun.size).value_or(1) == 1) return std::nullopt;
  Launch launch = read(lookup, kSrun, Launch::Kind::kSrun).value();
  const std::string counts = lookup("SLURM_STEP_TASKS_PER_NODE").value_or("");
  const std::optional<int> node = number(lookup, "SLURM_NODEID"), tasks = tasks_on(node.value_or(0), counts);
  TORCH_CHECK_VALUE(tasks && lookup(kSrun.local_rank) && launch.local_rank < *tasks,
                    "launch: expected SLURM_LOCALID, and in ",
                    "SLURM_STEP_TASKS_PER_NODE as many tasks of each node as in 2(x3),1, more than that, got '", counts,
                    "' for node ", node.value_or(0), ". srun sets them.");
  launch.local_size = *tasks;
  return launch;
}

std::string text_of(const VariableSet& set, const Launch& launch) {
  return std::string(set.rank) + "=" + std::to_string(launch.rank) + ", " + set.size + "=" + std::to_string(launch.size);
}

const VariableSet& set_of(const Launch& mpi) { return mpi.kind == Launch::Kind::kSrun ? kSrun : kOpenMpi; }

bool agree(const Launch& a, const Launch& b) { return a.rank == b.rank && a.size == b.size; }

void check_agree(const Launch& mpi, const Launch& torchrun) {
  TORCH_CHECK_VALUE(agree(mpi, torchrun),
                    "launch: expected one launcher, got two that disagree: ", text_of(set_of(mpi), mpi), " (",
                    set_of(mpi).launcher, ") and ", text_of(kTorchrun, torchrun), " (", kTorchrun.launcher,
                    "). Unset the variables of the one that did not start this process.");
}

// Any trace of a second process: a number above 0, or a count above 1. True where it says that there is none.
bool refuse_several(const EnvironmentLookup& lookup, const VariableSet& set) {
  std::string said;
  bool are_several = false;
  const auto take = [&](const char* name, int most_of_one) {
    const std::optional<int> value = name ? number(lookup, name) : std::nullopt;
    if (!value) return false;
    said += (said.empty() ? "" : ", ") + std::string(name) + "=" + std::to_string(*value);
    are_several |= *value > most_of_one;
    return true;
  };
  take(set.rank, 0);
  const bool has_size = take(set.size, 1);
  take(set.local_rank, 0), take(set.local_size, 1);
  TORCH_CHECK_VALUE(!are_several, "launch: expected a launcher that smp knows, got ", set.launcher, " (", said, "). ",
                    kWhatWorks);
  return has_size;
}

// MPI_Init in a process that no launcher has started, as an import of mpi4py calls it, leaves PMIX_RANK=0 behind.
EnvironmentLookup of_launchers(const EnvironmentLookup& environment) {
  if (environment("OMPI_MCA_ess") != "singleton") return environment;
  return
      [environment](const char* name) { return std::string_view(name) == "PMIX_RANK" ? std::nullopt : environment(name); };
}

void refuse_unknown(const EnvironmentLookup& lookup) {
  bool is_known_to_be_alone = false;
  for (const VariableSet& set : kRefusedLaunchers) is_known_to_be_alone |= refuse_several(lookup, set);
  // PMIx has no variable for the size.
  const std::optional<int> pmix_rank = number(lookup, "PMIX_RANK");
  TORCH_CHECK_VALUE(!pmix_rank || (is_known_to_be_alone && *pmix_rank == 0),
                    "launch: expected a launcher that smp knows, got one that speaks PMIx ",
                    "(PMIX_RANK=", pmix_rank.value_or(0), ") but is not Open MPI's mpirun. ", kWhatWorks);
}

}  // namespace

std::optional<std::string> process_environment(const char* name) {
  const char* value = getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

Launch detect_launch(const EnvironmentLookup& environment) {
  const EnvironmentLookup lookup = of_launchers(environment);
  const auto mpirun = read(lookup, kOpenMpi, Launch::Kind::kMpirun);
  // Without LOCAL_RANK, RANK and WORLD_SIZE beside another launcher's may be those of a host (Volcano).
  std::optional<Launch> torchrun;
  if (lookup(kTorchrun.local_rank)) torchrun = read(lookup, kTorchrun, Launch::Kind::kTorchrun);

  // Scripts set torchrun's variables from mpirun's for torch.distributed; then they are equal.
  if (mpirun && torchrun) check_agree(*mpirun, *torchrun);
  if (mpirun) return *mpirun;
  if (const auto srun = read_srun(lookup)) {
    // srun starts a torchrun on each node, too.
    const bool is_of_torchrun = torchrun && torchrun->size > 1 && !agree(*srun, *torchrun);
    if (torchrun && !is_of_torchrun) check_agree(*srun, *torchrun);
    if (!is_of_torchrun) return *srun;
  }
  if (torchrun && torchrun->size > 1) {
    torchrun->store = read_store(lookup);
    return *torchrun;
  }
  refuse_unknown(lookup);
  return {};
}

std::string describe_mismatch(const Launch& launch, int rank, int size) {
  if (launch.rank == rank && launch.size == size) return "";
  return c10::str("launch: expected MPI to find rank ", launch.rank, " of ", launch.size, " (",
                  text_of(set_of(launch), launch), "), got rank ", rank, " of ", size,
                  ": these variables are not those of the launcher that started this process. ", kWhatWorks);
}

void set_mpi_defaults(const Launch& launch) {
  constexpr int kKeepTheUsers = 0;
  setenv("OMPI_MCA_pml", "ob1", kKeepTheUsers);
  setenv("OMPI_MCA_btl", launch.local_size < launch.size ? "self,vader,tcp" : "self,vader", kKeepTheUsers);
  setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", kKeepTheUsers);  // docs/decisions/large-messages.md
  setenv("OMPI_MCA_btl_vader_eager_limit", "16384", kKeepTheUsers);
}

}  // namespace smp::runtime
